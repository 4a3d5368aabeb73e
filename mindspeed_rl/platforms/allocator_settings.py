"""Removes allocator settings from the environment that break the engine's memory pool.

They are changed before torch is imported. An engine that frees memory through a pool of its own
(vLLM's sleep mode, vLLM-Ascend's camem) frees nothing, or fails after minutes, when the caching
allocator grows its segments in place.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WANTED = "MINDSPEED_RL_EXPANDABLE_SEGMENTS"
"""Variable set to 1 where the NPU's asked for the setting, so that training can switch it on."""
_KEY = "expandable_segments"
_NPU = "PYTORCH_NPU_ALLOC_CONF"


def without_expandable_segments(environ: MutableMapping[str, str]) -> list[str]:
    """Remove the setting from every variable and keep the variable's other settings.

    Args:
        environ: Environment, which is changed in place.

    Returns:
        One line for the log per variable that was changed.
    """
    notes = []
    for variable in VARIABLES:
        value = environ.get(variable, "")
        parts = [part for part in value.split(",") if part.strip()]
        kept = [part for part in parts if not _switched_on(part)]
        if len(kept) == len(parts):
            continue
        if variable == _NPU:
            environ[WANTED] = "1"
        if kept:
            environ[variable] = ",".join(kept)
        else:
            del environ[variable]
        notes.append(
            f"{variable}={value}: {_KEY} is taken out, the engine's memory pool does not work "
            "with it"
        )
    return notes


def _switched_on(part: str) -> bool:
    name, _, value = part.partition(":")
    return name.strip() == _KEY and value.strip().lower() in ("true", "1")
