"""Undoes what the construction of vLLM-Ascend leaves changed for the whole process.

Its runner replaces functions of ``torch.cuda`` while it is built. Afterwards ``torch.cuda.Event``
is a class whose ``record`` and ``wait`` do nothing, so a trainer that orders copies by events would
order nothing. It also wraps Python's import function, which makes every later import slower.

Its replacements in ``torch.accelerator`` stay: they lead to the same functions of ``torch.npu``,
and the running engine uses them.
"""

from __future__ import annotations

import builtins
from typing import Any

import torch

_CUDA_NAMES = (
    "Event", "Stream", "default_stream", "current_stream", "stream", "synchronize", "mem_get_info",
)  # fmt: skip


class ProcessChanges:
    """The state of torch and Python before an engine is built."""

    def __init__(self) -> None:
        torch.cuda.is_available()  # some names are bound at the first use
        places: list[tuple[Any, str]] = [(torch.cuda, name) for name in _CUDA_NAMES]
        places += [(torch, "Event"), (builtins, "__import__")]
        self._before = [(owner, name, getattr(owner, name)) for owner, name in places]

    def undo(self) -> None:
        """Put everything back that is another object now."""
        for owner, name, value in self._before:
            setattr(owner, name, value)
