"""The first steps of every entry: environment, platform, versions, process group.

The order matters and is fixed here: environment variables before torch is imported, the process
group before megatron-core and vLLM, the platform's installation before any megatron-core model.
Torch is not imported at module level, so argument errors appear at once.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.core import owned_folders
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import foreign_packages, resolve_platform
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.launch import machine
from mindspeed_rl.platforms.allocator_settings import without_expandable_segments
from mindspeed_rl.platforms.custom_operators import add_custom_operators

if TYPE_CHECKING:
    from mindspeed_rl.config.npu import NpuSetup
    from mindspeed_rl.platforms.base import Platform

# Variables that must be set before torch is imported; a user's own value wins.
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Hides C++ notices such as vLLM's NUMA policy; errors still show.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Variables by platform; torch.compile, which reads its own, is imported after they are set. On a
# CPU it costs 10 s of C++ compilation and gains nothing for small models.
_PLATFORM_DEFAULTS = {
    "cpu": {"TORCH_COMPILE_DISABLE": "1"},
    "npu": {
        # A rank that waits in a rollout joins the next collective late.
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "3600",
        # MindSpeed reads every attribute of every module, which imports all of transformers.
        "TRANSFORMERS_VERBOSITY": "error",
    },
}
# Variables of --npu-deterministic; HCCL and the kernel library read them when they are loaded.
# "strict" also fixes the order in which the ranks' values are added.
_DETERMINISTIC = {
    "HCCL_DETERMINISTIC": "strict",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
}


@dataclass(frozen=True, slots=True)
class World:
    """Rank of this process and number of ranks, in the job and on its node, set by torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> World:
        """Read torchrun's variables; without them this process is the only rank."""
        get = os.environ.get
        return cls(
            int(get("RANK", "0")),
            int(get("WORLD_SIZE", "1")),
            int(get("LOCAL_RANK", "0")),
            int(get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1"))),
        )


def prepare_environment(
    platform: str,
    environ: MutableMapping[str, str],
    *,
    deterministic: bool = False,
    buffer_mb: int = 0,
    longest_phase_s: float = 0.0,
) -> list[str]:
    """Set the variables that torch, torch_npu and the engine read at import; call this before.

    Args:
        platform: Value of ``--platform``.
        environ: Environment, changed in place.
        deterministic: Whether an NPU process must reproduce results bit by bit.
        buffer_mb: MiB of HCCL's buffers in an NPU process; 0 leaves what there is.
        longest_phase_s: Limit of the phase that may take longest.

    Returns:
        Notes on the user's settings that were changed, with reasons.
    """
    late = [
        n
        for n in ("torch", "torch_npu", engine_provider().package, "megatron.core")
        if n in sys.modules
    ]
    if late:
        raise RuntimeError(
            f"bootstrap: {late[0]} was imported before the environment was prepared; "
            "an entry must import none of these before mindspeed_rl.launch.bootstrap"
        )
    platform = resolve_platform(platform)
    set_defaults(platform, environ, longest_phase_s)
    notes = without_expandable_segments(environ) if platform != "cpu" else []
    if deterministic and platform == "npu":
        for name, value in _DETERMINISTIC.items():
            if environ.get(name, value) != value:
                notes.append(f"{name}={environ[name]}: --npu-deterministic sets {value}")
            environ[name] = value
    if buffer_mb and platform == "npu":
        environ["HCCL_BUFFSIZE"] = str(buffer_mb)
        notes.append(
            f"HCCL_BUFFSIZE={buffer_mb}: what the engine's dispatch of experts needs; groups of "
            "the trainer keep their sizes (--hccl-group-buffer)"
        )
    return notes


def set_defaults(
    platform: str, environ: MutableMapping[str, str], longest_phase_s: float = 0.0
) -> None:
    """Set the defaults of :func:`prepare_environment`, without its check of imports.

    HCCL lets a collective wait for a rank as long as a phase may take.
    """
    engine = engine_provider()
    own = _DEFAULTS | _PLATFORM_DEFAULTS.get(platform, {})
    if platform == "npu":
        least = max(float(own["HCCL_EXEC_TIMEOUT"]), longest_phase_s)
        own |= {"HCCL_EXEC_TIMEOUT": str(math.ceil(least))}
    rank = int(environ.get("RANK", "0"))
    for name, value in (own | dict(engine.environment(platform, rank))).items():
        environ.setdefault(name, value)
    for name in engine.cleared_variables:
        environ.pop(name, None)
    if _on_one_node(environ) and "lo" in (name for _, name in socket.if_nameindex()):
        # Its ranks speak to each other alone, so their sockets are on no other interface.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if platform == "npu":
        add_custom_operators(environ)
        environ.setdefault("TORCH_EXTENSIONS_DIR", str(_extension_folder(environ)))


def _on_one_node(environ: Mapping[str, str]) -> bool:
    """Whether a launcher says that all ranks are on this node."""
    world = environ.get("WORLD_SIZE")
    return world is not None and world == environ.get("LOCAL_WORLD_SIZE")


def _extension_folder(environ: Mapping[str, str]) -> Path:
    """Return where the ranks of this job on this node compile extensions of torch.

    MindSpeed deletes the whole folder when it finds a lock in it, and so would end the compilation
    of another job. Jobs that share a node meet at different addresses or ports, and a job that is
    started again with its own finds what it compiled.
    """
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    meeting = [environ.get(name, "0") for name in ("MASTER_ADDR", "MASTER_PORT")]
    job = "-".join([socket.gethostname(), *meeting]).replace("/", "-")
    return Path(cache, "mindspeed_rl", "torch_extensions", job)


_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launcher(prog: str, environ: MutableMapping[str, str]) -> None:
    """Make a process that no launcher started the only rank of its job. Local.

    Raises:
        UsageError: Some of the launcher's variables are set and others are missing.
    """
    missing = [name for name in _LAUNCHER if name not in environ]
    if len(missing) == len(_LAUNCHER):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = ("0", "1", "127.0.0.1", str(port))
        environ.update(zip(_LAUNCHER, alone, strict=True))
        environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    elif missing:
        raise UsageError(
            f"{', '.join(missing)} not set, but others of {', '.join(_LAUNCHER)}; set all, as "
            f"torchrun --nproc-per-node <ranks> -m {prog} does, or none for a job of one rank"
        )


def refuse_foreign_package() -> None:
    """End if another package named ``mindspeed_rl`` is on the path.

    Raises:
        UsageError: There is one; the message names both places in one line.
    """
    for other in foreign_packages():
        raise UsageError(
            f"another package named mindspeed_rl is on the path: {other} (this one: "
            f"{Path(__file__).resolve().parents[1]}); uninstall it or remove it from "
            "PYTHONPATH; a copy that pip made of this one is replaced by: pip install -e ."
        )


def start(
    platform_name: str,
    timeout_minutes: int,
    world: World,
    setup: NpuSetup | None = None,
    *,
    engine: bool = True,
) -> Platform:
    """Import torch, join the process group, install the platform. Collective: the world.

    Args:
        platform_name: Value of ``--platform``.
        timeout_minutes: Timeout of one collective.
        world: Rank of this process and number of ranks.
        setup: Settings of an NPU process.
        engine: Whether the run has an inference engine.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from mindspeed_rl.platforms.registry import select_platform

    platform = select_platform(platform_name)
    for name, value in _PLATFORM_DEFAULTS.get(platform.name, {}).items():
        os.environ.setdefault(name, value)
    machine.bind_device(platform)
    if resolve_platform(platform_name) == "auto":  # others were checked before torch was imported
        machine.check_versions(platform.name, engine=engine)
    dist.init_process_group(platform.backend, timeout=timedelta(minutes=timeout_minutes))
    platform.install(setup)
    return platform


def tidy_temporary_folders(world: World, environ: Mapping[str, str]) -> None:
    """Remove what killed processes of earlier jobs left, and mark torchrun's folder of this job.

    The first rank of a node does it. Local.
    """
    if world.local_rank:
        return
    owned_folders.sweep((owned_folders.PREFIX, owned_folders.LAUNCHER_PREFIX))
    # torchrun keeps .../torchelastic_XXXX/RUN/attempt_N/RANK/error.json
    folders = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    for folder in folders:
        if folder.name.startswith(owned_folders.LAUNCHER_PREFIX):
            with suppress(OSError):  # a full disk: the folder stays, and the run goes on
                owned_folders.claim(folder)


def quiet_libraries() -> None:
    """Silence library notices that no user of this project can act on."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|megatron|vllm)\b")
    for name in ("torch._library.triton", "megatron.core.rerun_state_machine"):
        logging.getLogger(name).setLevel(logging.ERROR)


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch with the same seed on all ranks. Local."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
