"""Packs many small storages into one, so that later copies are a single copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from mindspeed_rl.platforms.storages import identity, num_bytes, storages_of

# Alignment at which element-wise kernels read whole vectors.
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """The place of a tensor in the packed storage.

    Attributes:
        tensor: Tensor whose memory is moved; no other view of it may be used afterwards.
        offset: Offset in elements.
        size: Shape of the tensor.
        stride: Stride of each dimension.
    """

    tensor: torch.Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def move_into(self, storage: torch.UntypedStorage) -> None:
        """Make the tensor a view of ``storage``."""
        view = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        self.tensor.data = view.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Packing:
    """The places of some tensors, and the order of their storages in the packed one."""

    storages: tuple[torch.UntypedStorage, ...]
    places: tuple[PackedPlace, ...]
    num_bytes: int


def plan_packing(tensors: Sequence[torch.Tensor]) -> Packing:
    """Lay the allocated storages of the tensors out without gaps. Pure.

    Storages whose size keeps the next one aligned come first; after them large elements come before
    small ones, so that every element starts at a multiple of its size.
    """
    items: dict[int, int] = {}
    for tensor in tensors:
        key = identity(tensor.untyped_storage())
        items[key] = max(items.get(key, 0), tensor.element_size())

    def order(storage: torch.UntypedStorage) -> tuple[bool, int]:
        return storage.nbytes() % _ALIGNED_BYTES != 0, -items[identity(storage)]

    storages = tuple(sorted(storages_of(tensors), key=order))
    sizes = (storage.nbytes() for storage in storages)
    starts = dict(zip(map(identity, storages), accumulate(sizes, initial=0), strict=False))
    places = []
    for tensor in tensors:
        start, item = starts[identity(tensor.untyped_storage())], tensor.element_size()
        assert start % item == 0, "element sizes divide their storages"
        offset = start // item + int(tensor.storage_offset())
        places.append(PackedPlace(tensor, offset, tensor.shape, tensor.stride()))
    return Packing(storages, tuple(places), num_bytes(storages))
