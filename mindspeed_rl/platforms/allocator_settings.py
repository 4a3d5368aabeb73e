"""Allocator settings of the environment against memory pools that cannot live with them.

Read before torch is imported, in no time. An engine that gives memory away through a pool
of its own (vLLM's sleep mode, vLLM-Ascend's camem) frees nothing, or fails after minutes, when the
caching allocator grows its segments in place.
"""

from __future__ import annotations

from collections.abc import MutableMapping

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
WANTED = "MINDSPEED_RL_EXPANDABLE_SEGMENTS"
"""Set to 1 where the NPU's variable asked for it, so that training can switch it on again."""
_KEY = "expandable_segments"
_NPU = "PYTORCH_NPU_ALLOC_CONF"


def without_expandable_segments(environ: MutableMapping[str, str]) -> list[str]:
    """Take the setting out of every variable; the rest of it stays.

    Args:
        environ: changed in place.

    Returns:
        What was done, one line a variable, for the start of the run.
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
