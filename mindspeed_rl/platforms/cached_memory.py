"""Memory that a caching allocator holds and no tensor has, from the allocator's own snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def free_ranges(snapshot: Iterable[Mapping[str, Any]]) -> list[range]:
    """Return the addresses of cached memory that no tensor has, in all pools. Pure.

    Args:
        snapshot: Result of ``torch.cuda.memory_snapshot``, or torch_npu's, whose segments have the
            same keys.
    """
    found = []
    for segment in snapshot:
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                found.append(range(at, at + block["size"]))
            at += block["size"]
    return found
