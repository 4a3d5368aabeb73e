"""Computes in fp64 what a program computes in fp32, to tell rounding from another mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# They say of which type bytes are that are there already.
_VIEWS = (torch.Tensor.view, torch.ops.aten.view.dtype)


def _in_double(
    func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Any:
    """Call a function with fp64 in the place of fp32."""
    named = dict(kwargs or {})
    if func not in _VIEWS:
        args = tuple(map(_doubled, args))
        named = {name: _doubled(value) for name, value in named.items()}
    return func(*args, **named)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Functions(TorchFunctionMode):
    """For functions that make tensors without an operator that is asked for the type."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _in_double(func, types, args, kwargs)


class _Operators(TorchDispatchMode):
    """For all operators, those of a backward pass as well."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _in_double(func, types, args, kwargs)


@contextmanager
def double_precision() -> Iterator[None]:
    """Within it tensors are made in fp64, and casts to fp32 are casts to fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Functions(), _Operators():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
