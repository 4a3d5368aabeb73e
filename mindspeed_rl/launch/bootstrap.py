"""What every entry does first: environment, platform, versions, process group.

The order matters and is fixed here: environment variables before torch is imported, the process
group before megatron-core and vLLM, the platform's installation before any megatron-core model.
Nothing of torch is imported at module level, so that argument errors take no seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.installed import resolve_platform
from mindspeed_rl.platforms.allocator_settings import without_expandable_segments

if TYPE_CHECKING:
    from mindspeed_rl.config.npu import NpuSetup
    from mindspeed_rl.platforms.base import Platform

# What must be set before torch or vllm is imported; a user's own value wins.
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # request ids are sample ids, unique within a call; a random suffix each costs 0.1 ms
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # C++ notices such as vLLM's NUMA policy; errors still show
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# By platform, set when it is known; torch.compile, which reads it, is imported after that. On a CPU
# it costs 10 s of C++ compilation and gains nothing for small models.
_PLATFORM_DEFAULTS = {
    "cpu": {"TORCH_COMPILE_DISABLE": "1"},
    "npu": {
        # a rank that waits in a rollout joins the next collective late
        "HCCL_CONNECT_TIMEOUT": "1800",
        "HCCL_EXEC_TIMEOUT": "3600",
        # MindSpeed looks at every attribute of every module, which imports all of transformers
        "TRANSFORMERS_VERBOSITY": "error",
        # weights must stay in the plain format that weight updates write (vllm-ascend)
        "VLLM_ASCEND_ENABLE_NZ": "0",
    },
}
# With --npu-deterministic; HCCL and the library of kernels read them when they are loaded. "strict"
# also keeps the order in which ranks are added up.
_DETERMINISTIC = {
    "HCCL_DETERMINISTIC": "strict",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
}
# A whole number of GiB that would override --rollout-kv-cache-gb.
_REMOVED = ("VLLM_CPU_KVCACHE_SPACE",)


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers, as torchrun says."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> World:
        """Read torchrun's variables; one process when there are none."""
        get = os.environ.get
        return cls(
            int(get("RANK", "0")),
            int(get("WORLD_SIZE", "1")),
            int(get("LOCAL_RANK", "0")),
            int(get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1"))),
        )


def prepare_environment(
    platform: str, environ: MutableMapping[str, str], *, deterministic: bool = False
) -> list[str]:
    """Set what torch, torch_npu and vLLM read when they are imported; before any of them is.

    Args:
        platform: ``--platform``.
        environ: changed in place.
        deterministic: an NPU process is to give the same bits again.

    Returns:
        What of the user's own settings was changed, and why.
    """
    late = [n for n in ("torch", "torch_npu", "vllm", "megatron.core") if n in sys.modules]
    if late:
        raise RuntimeError(
            f"bootstrap: {late[0]} was imported before the environment was prepared; "
            "an entry must import none of these before mindspeed_rl.launch.bootstrap"
        )
    platform = resolve_platform(platform)
    set_defaults(platform, environ)
    notes = without_expandable_segments(environ) if platform != "cpu" else []
    if deterministic and platform == "npu":
        for name, value in _DETERMINISTIC.items():
            if environ.get(name, value) != value:
                notes.append(f"{name}={environ[name]}: --npu-deterministic sets {value}")
            environ[name] = value
    return notes


def set_defaults(platform: str, environ: MutableMapping[str, str]) -> None:
    """What :func:`prepare_environment` sets; without its check."""
    for name, value in (_DEFAULTS | _PLATFORM_DEFAULTS.get(platform, {})).items():
        environ.setdefault(name, value)
    for name in _REMOVED:
        environ.pop(name, None)


def require_launcher(prog: str, environ: Mapping[str, str]) -> None:
    """End an entry that was started as a plain Python module.

    Raises:
        UsageError: with the command to use.
    """
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in environ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set; start this entry with torchrun, on one machine: "
            f"torchrun --standalone --nproc-per-node <ranks> -m {prog} ..."
        )


def refuse_foreign_package() -> None:
    """End when another package named ``mindspeed_rl`` is on the path.

    Raises:
        UsageError: in one line, with both places.
    """
    here = Path(__file__).resolve().parents[1]
    for entry in sys.path:
        other = (Path(entry or ".") / "mindspeed_rl").resolve()
        if other != here and (other / "__init__.py").is_file():
            raise UsageError(
                f"another package named mindspeed_rl is on the path: {other} (this one: {here}); "
                "uninstall it or remove it from PYTHONPATH"
            )


def start(
    platform_name: str,
    timeout_minutes: int,
    world: World,
    setup: NpuSetup | None = None,
) -> Platform:
    """Import torch, join the process group, install the platform. Collective: the world.

    Args:
        platform_name: ``--platform``.
        timeout_minutes: of one collective.
        world: this process among its peers.
        setup: what an NPU process is told.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from mindspeed_rl.platforms.registry import select_platform

    platform = select_platform(platform_name)
    for name, value in _PLATFORM_DEFAULTS.get(platform.name, {}).items():
        os.environ.setdefault(name, value)
    platform.set_device()
    check_versions(platform.name)
    dist.init_process_group(platform.backend, timeout=timedelta(minutes=timeout_minutes))
    platform.install(setup)
    return platform


def quiet_libraries() -> None:
    """Silence notices of libraries that no user of this project can act on."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|megatron|vllm)\b")
    for name in ("torch._library.triton", "megatron.core.rerun_state_machine"):
        logging.getLogger(name).setLevel(logging.ERROR)


def check_versions(platform_name: str) -> None:
    """Compare what is installed with the matrix; exact pins only.

    Raises:
        UsageError: every package that differs, with the command that installs the right one.
    """
    from importlib.metadata import PackageNotFoundError, version

    from mindspeed_rl.core.versions import pins

    wrong = []
    for name, pinned in pins(platform_name).items():
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:
            installed = "not installed"
        if installed != pinned:
            wrong.append(f"{name} {installed} (needs {pinned})")
    if wrong and not os.environ.get("MINDSPEED_RL_ALLOW_VERSIONS"):
        raise UsageError(
            f"versions outside the matrix of {platform_name}: {', '.join(wrong)}; run "
            "pretrain_scripts/setup_env.sh, or set MINDSPEED_RL_ALLOW_VERSIONS=1 at your own risk"
        )


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch alike on all ranks. Local."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
