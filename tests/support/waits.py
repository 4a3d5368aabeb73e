"""Operators for which a host waits for its device, as a dispatch mode counts them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
#: Their results have a size, or are numbers, that only the values on the device tell.
WAITING = {
    _ATEN._local_scalar_dense.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.bincount.default,
    _ATEN._unique2.default,
    _ATEN.repeat_interleave.Tensor,
}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}


class Waits(TorchDispatchMode):
    """Counts waiting operators by ``(operator, file, function)`` of the code that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.counts = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        by_mask = func in _INDEXED and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if self.counts and (func in WAITING or by_mask):
            self.found[str(func.overloadpacket.__name__), *_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> tuple[str, str]:
    """File and function of the innermost frame that belongs neither to torch nor to this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            return "/".join(name.rsplit("/", 2)[-2:]), frame.f_code.co_name
        frame = frame.f_back
    return "", ""
