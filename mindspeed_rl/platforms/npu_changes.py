"""Undoes what the construction of vLLM-Ascend leaves changed for the whole process.

Its runner replaces functions of ``torch.cuda`` while it is built. Afterwards ``torch.cuda.Event``
is a class whose ``record`` and ``wait`` do nothing, so a trainer that orders copies by events would
order nothing. It also wraps Python's import function, which makes every later import slower.

Its runner's module allows tensors in private memory formats. In torch_npu operators that create
such tensors (convolutions, and all of the old operator interface) then may do so in the trainer,
too, whose memory is moved and compared as plain bytes. The engine has its weights in ND and creates
none, so the option gets its former value.

Its replacements in ``torch.accelerator`` stay: they lead to the same functions of ``torch.npu``,
and the running engine uses them.
"""

from __future__ import annotations

import builtins
import sys
from typing import Any

import torch

_CUDA_NAMES = (
    "Event", "Stream", "default_stream", "current_stream", "stream", "synchronize", "mem_get_info",
)  # fmt: skip
_PRIVATE_FORMATS = "ALLOW_INTERNAL_FORMAT"  # torch.npu.config.allow_internal_format, write-only


class ProcessChanges:
    """The state of torch and Python before an engine is built."""

    def __init__(self) -> None:
        torch.cuda.is_available()  # some names are bound at the first use
        places: list[tuple[Any, str]] = [(torch.cuda, name) for name in _CUDA_NAMES]
        places += [(torch, "Event"), (builtins, "__import__")]
        self._before = [(owner, name, getattr(owner, name)) for owner, name in places]
        self._formats = _option(_PRIVATE_FORMATS)

    def undo(self) -> None:
        """Put everything back that is another object now."""
        for owner, name, value in self._before:
            setattr(owner, name, value)
        if _option(_PRIVATE_FORMATS) != self._formats:
            sys.modules["torch_npu"]._C._npu_setOption({_PRIVATE_FORMATS: self._formats})


def _option(name: str) -> str:
    """Return an option of torch_npu; empty without torch_npu."""
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is None:
        return ""
    torch_npu.npu.init()  # the defaults are set there
    value: bytes | None = torch_npu._C._npu_getOption(name)
    return "" if value is None else value.decode()
