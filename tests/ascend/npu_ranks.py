"""Runs a function on N ranks of emulated NPUs, or of the CPU, each started as torchrun would.

Unlike ``support/spawn.py`` nothing is imported before the ranks start: the order of imports on an
NPU is part of what is tested. A rank goes through the product's own bootstrap.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TEST_PLATFORM = "MINDSPEED_RL_TEST_PLATFORM"
MINDSPEED = os.environ.get("MINDSPEED_PATH", "")
needs_mindspeed = pytest.mark.skipif(
    not MINDSPEED, reason="MINDSPEED_PATH is not set: no checkout of MindSpeed core_r0.16.0"
)
WITH_AND_WITHOUT = [
    pytest.param(None, id="torch_npu"),
    pytest.param({"use_fused_rmsnorm": True}, id="mindspeed", marks=needs_mindspeed),
]


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
        features: MindSpeed's arguments; its adaptor is there only when they are given.
        timeout_s: limit of the whole world.

    Raises:
        AssertionError: with the traceback and the end of the log of every rank that failed.
    """
    work_dir.mkdir(exist_ok=True)
    task = (function.__module__, function.__qualname__, dict(features or {}))
    (work_dir / "task.pkl").write_bytes(pickle.dumps(task))
    (work_dir / "args.pkl").write_bytes(pickle.dumps(tuple(args)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = [os.environ["PYTHONPATH"]] if features is None else [MINDSPEED, os.environ["PYTHONPATH"]]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MINDSPEED_RL_ALLOW_VERSIONS": "1",  # torch_npu 2.13 instead of the matrix's 2.10
        "PYTHONPATH": os.pathsep.join(path),
        TEST_PLATFORM: platform,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(platform == "npu")),
    }
    ranks = []
    for rank in range(num_ranks):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (work_dir / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, "-m", "ascend.npu_ranks", str(work_dir)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    stories = [_story(work_dir, rank) for rank, code in enumerate(codes) if code]
    assert not stories, "\n".join(stories)
    return [pickle.loads((work_dir / f"rank{r}.result").read_bytes()) for r in range(num_ranks)]


def _story(folder: Path, rank: int) -> str:
    error = folder / f"rank{rank}.error"
    log = (folder / f"rank{rank}.log").read_text(errors="replace")
    return f"--- rank {rank}\n{error.read_text() if error.is_file() else log[-6000:]}"


def _run_task(folder: Path) -> None:
    """Body of a rank; the order is that of an entry."""
    from mindspeed_rl import bootstrap

    platform = os.environ[TEST_PLATFORM]
    bootstrap.prepare_environment(platform, os.environ)
    bootstrap.quiet_libraries()
    # the arguments come last: reading them may import torch
    module, name, features = pickle.loads((folder / "task.pkl").read_bytes())
    device = None
    if platform == "npu":
        if importlib.util.find_spec("mindspeed"):
            from ascend.emulator.stand_ins import install

            install("acl", "triton")  # of CANN and of triton-ascend
        from ascend.emulator.device import emulate

        device = emulate()
    world = bootstrap.World.from_environment()
    from mindspeed_rl.config.npu import NpuSetup

    bootstrap.start(platform, 5, world, NpuSetup(features))
    import torch.distributed as dist

    args = pickle.loads((folder / "args.pkl").read_bytes())
    result = getattr(importlib.import_module(module), name)(world, *args)
    (folder / f"rank{world.rank}.result").write_bytes(pickle.dumps(result))
    if device is not None:
        device.write_counts()
    dist.barrier()


def main() -> None:
    """Body of a rank; its folder is the first argument."""
    folder = Path(sys.argv[1])
    try:
        _run_task(folder)
    except BaseException:
        (folder / f"rank{os.environ['RANK']}.error").write_text(traceback.format_exc())
        os._exit(1)  # peers may be in a collective that this rank will never join
    os._exit(0)  # torch_npu's own exit handlers expect a device


if __name__ == "__main__":
    main()
