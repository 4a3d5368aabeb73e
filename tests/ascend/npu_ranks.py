"""Runs a function on N ranks of emulated NPUs, or of the CPU.

A rank goes through the product's own bootstrap. With MindSpeed each is started as torchrun would;
without it ranks are forks of a process that has prepared the environment and installed the
platform, in the order of the product (``test_bootstrap.py`` tests it, in processes of its own).
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ascend import whole_job
from ascend.emulator import process
from support import warm_ranks
from support.jobs import free_port
from support.spawn import end_ranks, run_body
from support.warm_ranks import Rank, Server

JOB_FILE = "job.pkl"
TEST_PLATFORM = "MINDSPEED_RL_TEST_PLATFORM"
MINDSPEED = os.environ.get("MINDSPEED_PATH", "")
needs_mindspeed = pytest.mark.skipif(
    not MINDSPEED, reason="neither MINDSPEED_PATH nor MINDSPEED_SOURCE gives MindSpeed core_r0.16.0"
)
WITH_AND_WITHOUT = [
    pytest.param(None, id="torch_npu"),
    pytest.param({"use_fused_rmsnorm": True}, id="mindspeed", marks=needs_mindspeed),
]

_SERVERS = {
    platform: Server(
        ("-m", "ascend.npu_ranks", "--serve", platform),
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(platform == "npu"))},
    )
    for platform in ("npu", "cpu")
}


def run_npu_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    work_dir: Path,
    args: Sequence[Any] = (),
    platform: str = "npu",
    features: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Call ``function(world, *args)`` on every rank; the results in rank order.

    Args:
        function: at the top level of an importable module.
        num_ranks: size of the world.
        work_dir: for logs and results.
        args: further arguments; must pickle.
        platform: ``"npu"``, or ``"cpu"`` for what it is compared with.
        features: MindSpeed's arguments; its adaptor is there only when they are given. With the
            key ``flags`` those that a run with these flags gives it.
        timeout_s: limit of the whole world.

    Raises:
        RankError: with the traceback and the end of the log of every rank.
    """
    work_dir.mkdir(exist_ok=True)
    task = (function.__module__, function.__qualname__, dict(features or {}))
    (work_dir / "task.pkl").write_bytes(pickle.dumps(task))
    (work_dir / "args.pkl").write_bytes(pickle.dumps(tuple(args)))
    ranks = _start(work_dir, num_ranks, platform, mindspeed=features is not None)
    end_ranks(function.__name__, work_dir, ranks, timeout_s)
    return [pickle.loads((work_dir / f"rank{r}.result").read_bytes()) for r in range(num_ranks)]


def run_npu_job(
    job: whole_job.WholeJob,
    num_ranks: int,
    *,
    work_dir: Path,
    platform: str = "npu",
    mindspeed: bool = False,
    timeout_s: float = 300.0,
) -> list[Any]:
    """Run an entry with its flags on every rank; what ``ascend.whole_job`` noted, in rank order.

    Args:
        job: the command, and what is noted of it.
        num_ranks: size of the world.
        work_dir: for logs and results.
        platform: as for :func:`run_npu_ranks`; the flags have one as well.
        mindspeed: whether MindSpeed's adaptor is there.
        timeout_s: limit of the whole world.

    Raises:
        RankError: as :func:`run_npu_ranks`.
    """
    work_dir.mkdir(exist_ok=True)
    (work_dir / JOB_FILE).write_bytes(pickle.dumps(job))
    ranks = _start(work_dir, num_ranks, platform, mindspeed=mindspeed, emulated=platform == "npu")
    end_ranks(job.module, work_dir, ranks, timeout_s)
    return [pickle.loads((work_dir / f"rank{r}.result").read_bytes()) for r in range(num_ranks)]


def _start(
    work_dir: Path, num_ranks: int, platform: str, *, mindspeed: bool, emulated: bool = True
) -> list[subprocess.Popen[bytes] | Rank]:
    """Start the ranks, with the emulator's packages on their path or with the CPU's instead."""
    path = [entry for entry in sys.path if entry]
    if not emulated:
        cache = os.environ["MINDSPEED_RL_ASCEND_EMULATOR"]
        path = [entry for entry in path if not entry.startswith(cache)]
    if mindspeed:
        path = [MINDSPEED, os.environ["PYTHONPATH"]]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MINDSPEED_RL_ALLOW_VERSIONS": "1",  # torch_npu 2.13 instead of the matrix's 2.10
        "PYTHONPATH": os.pathsep.join(path),
        TEST_PLATFORM: platform,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(platform == "npu")),
    }
    ranks: list[subprocess.Popen[bytes] | Rank] = []
    for rank in range(num_ranks):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if not mindspeed:
            ranks.append(_SERVERS[platform].start(work_dir, environment))
        else:
            with (work_dir / f"rank{rank}.log").open("w") as log:
                command = [sys.executable, "-m", "ascend.npu_ranks", str(work_dir)]
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return ranks


def _run_task(folder: Path) -> None:
    """Body of a rank; the order is that of an entry."""
    from mindspeed_rl.launch import bootstrap

    platform = os.environ[TEST_PLATFORM]
    module, name, features = pickle.loads((folder / "task.pkl").read_bytes())
    if "torch" in sys.modules:  # a fork
        bootstrap.set_defaults(platform, os.environ)
    else:
        deterministic = "--npu-deterministic" in features.get("flags", ())
        bootstrap.prepare_environment(platform, os.environ, deterministic=deterministic)
    bootstrap.quiet_libraries()
    if platform == "npu":
        process.before_group()
    world = bootstrap.World.from_environment()
    bootstrap.start(platform, 5, world, _setup(features))
    process.after_adaptor()
    import torch.distributed as dist

    # the arguments come last: reading them may import torch
    args = pickle.loads((folder / "args.pkl").read_bytes())
    result = getattr(importlib.import_module(module), name)(world, *args)
    (folder / f"rank{world.rank}.result").write_bytes(pickle.dumps(result))
    dist.barrier()


def _setup(features: dict[str, Any]) -> Any:
    """What the bootstrap is told; ``flags`` in place of features: as a run with them would be."""
    from mindspeed_rl.config.npu import NpuSetup, npu_setup

    if "flags" not in features:
        return NpuSetup(features)
    from mindspeed_rl.command_line.arguments import parse
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.config.kernels import module_names

    argv = ["--hf-checkpoint", "x", "--prompt-data", "y", *features["flags"]]
    config = parse(RLRunConfig, argv, "test").config
    grouped = module_names(config.model, "npu").grouped_experts
    return npu_setup(config.ascend, config.parallel, config.train, grouped=grouped)


def _run_job(folder: Path) -> None:
    """Body of a rank that is a command."""
    job = pickle.loads((folder / JOB_FILE).read_bytes())
    noted = whole_job.run(job, os.environ[TEST_PLATFORM])
    (folder / f"rank{os.environ['RANK']}.result").write_bytes(pickle.dumps(noted))


def serve(platform: str) -> None:
    """Install a platform, then fork ranks on it."""
    from mindspeed_rl.launch import bootstrap

    channel = os.dup(1)
    os.dup2(2, 1)  # libraries print, and what is read there are process ids
    bootstrap.prepare_environment(platform, os.environ)
    bootstrap.quiet_libraries()
    if platform == "npu":
        from mindspeed_rl.config.npu import NpuSetup
        from mindspeed_rl.platforms import npu_install

        importlib.import_module("torch_npu")
        npu_install.install(NpuSetup())
    for name in warm_ranks.TRAINER_LIBRARIES + warm_ranks.RUN_MODULES:
        importlib.import_module(name)
    sys.stdout.flush()  # what they printed waits there
    os.dup2(channel, 1)
    task = warm_ranks.serve()
    if task is not None:
        warm_ranks.become_rank(Path(task["folder"]), task["environment"])
        main()


def main() -> None:
    """Body of a rank; its folder is the first argument. ``--serve PLATFORM`` makes a server."""
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
        return
    run_body(_run_job if Path(sys.argv[1], JOB_FILE).exists() else _run_task)
    os._exit(0)  # torch_npu's own exit handlers expect a device


if __name__ == "__main__":
    main()
