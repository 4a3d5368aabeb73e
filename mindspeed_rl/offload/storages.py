"""Storages behind tensors: the unit in which memory is released."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of the tensors, each once, in order of first use.

    Released storages have no address, so they are told apart by the object behind them.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())


def num_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Bytes that the storages hold now; released ones hold none."""
    return sum(storage.nbytes() for storage in storages)


def not_among(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors whose storage is none of the others'."""
    taken = {storage._cdata for storage in storages_of(others)}
    return [t for t in tensors if t.untyped_storage()._cdata not in taken]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A view of a whole storage, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
