"""Computes on ``npu`` tensors with the kernels of the CPU.

Under the emulated CANN (``cann.c``) the memory of an ``npu`` tensor is host memory. So each
operator is run by the CPU on tensors that alias that memory, and its results are put into new
``npu`` tensors. Allocation, views, storages, streams and copies stay with the real torch_npu.
Collectives on such aliases go to gloo, the CPU half of a ``cpu:gloo,npu:hccl`` group. Operators of
torch_npu itself need a reference (``operators.py``); one without fails.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from ascend.emulator import engine_operators  # noqa: F401 - registers references
from ascend.emulator.census import CENSUS
from ascend.emulator.operators import REFERENCES
from torch.utils._python_dispatch import TorchDispatchMode

# torch_npu does these itself: they allocate or describe memory and compute nothing.
_NATIVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_with_format",
    "set_", "resize_", "record_stream", "_pin_memory", "is_pinned", "lift_fresh", "detach",
}  # fmt: skip
_NATIVE_NPU = {"npu::get_npu_format"}
# Ten random numbers per thread, rounded up to a multiple of four.
_RANDOM_STEP = 12
# Operators whose kernel for NPUs is a Python function: it runs with the emulation on.
_IN_PYTHON: set[str] = set()


def is_npu(value: object) -> bool:
    """Whether a value is a tensor on an emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor, which keeps that memory alive."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * size).from_address(storage.data_ptr())
    memory.owner = storage
    if size % tensor.itemsize == 0:
        whole = torch.frombuffer(memory, dtype=tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    odd = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(odd, tensor.storage_offset(), tensor.shape, tensor.stride())


def as_npu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on an emulated device, with its strides."""
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    as_cpu(new).copy_(tensor)
    return new


def _drawing(generator: torch.Generator) -> torch.Generator:
    """A generator of the CPU for one operator, by the seed and offset of one of a device.

    The offset moves on by as much as torch_npu's ``uniform_`` and ``exponential_`` take.
    """
    offset = generator.get_offset()
    drawn = torch.Generator().manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    generator.set_offset(offset + _RANDOM_STEP)
    return drawn


@dataclass(frozen=True, slots=True)
class _Operator:
    """What has to be known of an operator.

    Attributes:
        name: with its namespace.
        composite: it may be a view, and consists of others; those come one by one.
        native: torch_npu does it itself.
        can: it is one of torch's, or has a reference.
        reference: what it computes, by the names of its arguments.
        arguments: those names.
    """

    name: str
    composite: bool
    native: bool
    can: bool
    reference: Callable[..., Any] | None
    arguments: tuple[str, ...]


@cache
def _operator(func: Any) -> _Operator:
    name = func._schema.name
    namespace, _, short = name.partition("::")
    native = namespace == "aten" and (short in _NATIVE or _is_view(func))
    reference = REFERENCES.get(name)
    return _Operator(
        name,
        namespace == "aten" and _is_view(func) and func._can_decompose(),
        native or name in _NATIVE_NPU or name in _IN_PYTHON,
        namespace in ("aten", "c10d") or reference is not None,
        reference,
        tuple(argument.name for argument in func._schema.arguments),
    )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of everything in nested tuples, lists and dictionaries; pytree is slow."""
    if isinstance(value, tuple):
        return tuple([_mapped(function, one) for one in value])
    if isinstance(value, list):
        return [_mapped(function, one) for one in value]
    if isinstance(value, dict):
        return {key: _mapped(function, one) for key, one in value.items()}
    return function(value)


def _first_npu(values: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor on an emulated device among nested values."""
    for value in values:
        if isinstance(value, (tuple, list)):
            if (found := _first_npu(value)) is not None:
                return found
        elif is_npu(value):
            return value  # type: ignore[no-any-return]
    return None


class EmulatedNpu(TorchDispatchMode):
    """While it is entered, operators on ``npu`` tensors compute."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        on_npu = _first_npu(args)
        if on_npu is None:
            on_npu = _first_npu(kwargs.values())
        if on_npu is None and (asked is None or torch.device(asked).type != "npu"):
            return func(*args, **kwargs)
        operator = _operator(func)
        if operator.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if operator.native:
            return func(*args, **kwargs)
        if not operator.can:
            raise NotImplementedError(f"the emulator has no reference of {operator.name}")
        if asked is not None:
            target = torch.device(asked)
        else:
            assert on_npu is not None
            target = on_npu.device
        result = self._on_cpu(func, operator, args, kwargs, target)
        CENSUS.note(operator.name, args, kwargs, result)
        return result

    def _on_cpu(
        self,
        func: Any,
        operator: _Operator,
        args: Any,
        kwargs: dict[str, Any],
        target: torch.device,
    ) -> Any:
        """Run an operator on aliases; what it returns is on ``target``."""
        aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

        def down(value: Any) -> Any:
            if is_npu(value):
                known = [alias for tensor, alias in aliases if tensor is value]
                if not known:
                    known = [as_cpu(value)]
                    aliases.append((value, known[0]))
                return known[0]
            if isinstance(value, torch.Generator) and value.device.type == "npu":
                return _drawing(value)
            is_device = isinstance(value, torch.device) and value.type == "npu"
            return torch.device("cpu") if is_device else value

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
                return value
            for tensor, alias in aliases:
                if alias is value:
                    return tensor
            return as_npu(value, target) if target.type == "npu" else value

        args, kwargs = _mapped(down, args), _mapped(down, kwargs)
        kwargs.pop("pin_memory", None)
        if operator.reference is None:
            return _mapped(up, func(*args, **kwargs))
        named = dict(zip(operator.arguments, args, strict=False))
        return _mapped(up, operator.reference(**named, **kwargs))


def _is_view(func: Any) -> bool:
    """Whether an operator returns another view of its argument."""
    infos = [result.alias_info for result in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _one_by_one(operations: Sequence[Any]) -> list[Any]:
    """``batch_isend_irecv`` without torch_npu's fused operator, which asks HCCL itself."""
    works = [p2p.op(p2p.tensor, p2p.peer, p2p.group, p2p.tag) for p2p in operations]
    return [work for work in works if work is not None]


def _note_python_kernels() -> None:
    """Keep the emulation on in kernels that Python registers, as vLLM's custom operators do."""
    library: Any = torch.library.Library
    register = library.impl

    def impl(self: Any, name: Any, kernel: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key != "PrivateUse1":
            return register(self, name, kernel, dispatch_key, **options)  # type: ignore[no-any-return]
        short = name if isinstance(name, str) else name._schema.name.partition("::")[2]
        _IN_PYTHON.add(short if "::" in short else f"{self.ns}::{short.partition('.')[0]}")

        def emulated(*args: Any, **kwargs: Any) -> Any:
            with _MODE[0]:
                return kernel(*args, **kwargs)

        return register(self, name, emulated, dispatch_key, **options)  # type: ignore[no-any-return]

    library.impl = impl


def _where(original: Callable[..., Any]) -> Callable[..., Any]:
    """With a condition alone torch_npu computes ``where`` before a dispatch mode sees it."""

    @functools.wraps(original)
    def where(condition: torch.Tensor, *args: Any, **options: Any) -> Any:
        if args or options:
            return original(condition, *args, **options)
        return condition.nonzero(as_tuple=True)

    return where


def _with_gloo(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Groups that are asked of HCCL alone have gloo as well, which moves what is on aliases."""

    @functools.wraps(new_group)
    def made(*args: Any, backend: Any = None, **options: Any) -> Any:
        both = "cpu:gloo,npu:hccl" if str(backend) == "hccl" else backend
        return new_group(*args, backend=both, **options)

    return made


_MODE: list[EmulatedNpu] = []


def emulate() -> None:
    """Switch the emulation on for the rest of this process. Idempotent."""
    CENSUS.start()
    if not _MODE:
        _MODE.append(EmulatedNpu())
        _MODE[0].__enter__()
        dist.batch_isend_irecv = _one_by_one
        torch.where = _where(torch.where)
        dist.new_group = _with_gloo(dist.new_group)
        _note_python_kernels()
