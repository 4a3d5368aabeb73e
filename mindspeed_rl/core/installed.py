"""Which packages are installed and visible, found out without importing torch or any of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError

_BUILT_FOR = re.compile(r"__device_type__\s*=\s*['\"](\w+)['\"]")
VISIBLE_DEVICES = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
"""Environment variable that chooses the visible devices of a platform."""
ALLOW_VERSIONS = "MINDSPEED_RL_ALLOW_VERSIONS"
"""Environment variable that lets a run start with versions outside the matrix."""
ALLOW_SHARED_DEVICES = "MINDSPEED_RL_ALLOW_SHARED_DEVICES"
"""Environment variable that lets a run start on devices that other processes use."""


def resolve_platform(name: str) -> str:
    """Replace ``auto`` by ``npu`` where torch_npu is installed.

    Elsewhere the name stays: whether ``auto`` means CUDA or CPU only torch can tell.
    """
    return "npu" if name == "auto" and find_spec("torch_npu") else name


def has_mindspeed() -> bool:
    """Whether MindSpeed, whose adaptor makes megatron-core run on NPUs, can be imported."""
    return find_spec("mindspeed") is not None


def has_nvidia_driver() -> bool:
    """Whether this machine has NVIDIA's driver, found out by the file of its control device."""
    return Path("/dev/nvidiactl").exists()


def probable_platform(name: str) -> str:
    """Replace ``auto`` by the platform that torch will most likely find, without loading torch."""
    kind = resolve_platform(name)
    if kind != "auto":
        return kind
    return "cuda" if has_nvidia_driver() else "cpu"


def has_transformer_engine(platform: str) -> bool:
    """Whether megatron-core's Transformer Engine modules can be built on a platform.

    On NPUs MindSpeed's replacements stand in for them.
    """
    platform = resolve_platform(platform)
    if platform == "npu":
        return has_mindspeed()
    return platform != "cpu" and find_spec("transformer_engine") is not None


def engine_machine() -> str:
    """Return the kind of machine that the installed vLLM-Ascend was built for, like ``"a3"``.

    Empty where it is not installed.
    """
    spec = find_spec("vllm_ascend")
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place, "_build_info.py")
        if path.is_file() and (found := _BUILT_FOR.search(path.read_text())):
            return found[1].lower()
    return ""


def foreign_packages() -> Iterator[str]:
    """Yield the folders of other packages named ``mindspeed_rl``, in the order of ``sys.path``."""
    here = Path(__file__).resolve().parents[1]
    for entry in dict.fromkeys(sys.path):
        other = (Path(entry or ".") / "mindspeed_rl").resolve()
        if other != here and (other / "__init__.py").is_file():
            yield str(other)


def import_ray(flag: str, otherwise: str) -> Any:
    """Import the package ray, which only some flags need.

    Args:
        flag: Flag and value that need it, for the message.
        otherwise: What the user can do without it, for the message.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"{flag} needs the package ray: install it with pretrain_scripts/setup_env.sh --ray, "
            f"or {otherwise}"
        ) from error
    return ray
