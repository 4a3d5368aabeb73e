"""The memory pool of vLLM-Ascend's sleep mode: memory is real.

What the pool unmaps is overwritten, so that whatever was not saved is lost. Its own classes run in
``tests/ascend``.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

GARBAGE = 0xC7


@dataclass
class Allocation:
    """One mapping of the pool; ``keeps`` holds the memory itself."""

    handle: tuple[int, int, int, int]
    tag: str
    keeps: torch.Tensor
    mapped: bool = True


class FakePool:
    """The module ``camem`` and its allocator in one."""

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Allocation] = {}
        self.copied_bytes: Counter[int] = Counter()
        self.CaMemAllocator = SimpleNamespace(get_instance=lambda: self)

    def place(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        """A contiguous copy in the pool."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        handle = (0, copy.numel() * copy.element_size(), copy.data_ptr(), 0)
        self.pointer_to_data[copy.data_ptr()] = Allocation(handle, tag, copy)
        return copy

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        """The contents are gone."""
        data = self.pointer_to_data[handle[2]]
        assert data.mapped, "unmapped twice"
        ctypes.memset(handle[2], GARBAGE, handle[1])
        data.mapped = False

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        """Fresh memory: what was there before is not."""
        data = self.pointer_to_data[handle[2]]
        assert not data.mapped, "mapped twice"
        ctypes.memset(handle[2], GARBAGE, handle[1])
        data.mapped = True

    def memcpy(self, to: int, limit: int, source: int, size: int, kind: int) -> int:
        """From the device to the host (2) or back (1); a status, 0 for success."""
        assert size <= limit and kind in (1, 2)
        device = source if kind == 2 else to
        for ptr, data in self.pointer_to_data.items():
            if ptr <= device < ptr + data.handle[1]:
                assert data.mapped and device + size <= ptr + data.handle[1]
                self.copied_bytes[kind] += size
                ctypes.memmove(to, source, size)
                return 0
        return 107001

    def wake_up(self, tags: Sequence[str]) -> None:
        """Map what has one of the tags."""
        for data in self.pointer_to_data.values():
            if data.tag in tags:
                assert not data.mapped, "mapped twice"
                data.mapped = True
