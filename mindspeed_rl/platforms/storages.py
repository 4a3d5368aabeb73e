"""Helpers for the storages behind tensors, which are the unit in which memory is released."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mindspeed_rl.platforms.host_pages import advise_large_pages


def identity(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage, even a released one, which has no address."""
    number: int = storage._cdata
    return number


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors, each once, in order of first use."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(identity(storage), storage)
    return list(found.values())


def num_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """Return the bytes that the storages hold now; released ones hold none."""
    return sum(storage.nbytes() for storage in storages)


def not_among(
    tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors that share no storage with the others."""
    taken = {identity(t.untyped_storage()) for t in others}
    return [t for t in tensors if identity(t.untyped_storage()) not in taken]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a whole storage, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def take_memory(storage: torch.UntypedStorage, size: int) -> None:
    """Allocate the memory of a released storage again; its content is undefined. Local.

    Raises:
        RuntimeError: The device is out of memory.
    """
    storage.resize_(size)
    if storage.device.type == "cpu":
        advise_large_pages(storage.data_ptr(), size)


def outside(whole: range, spans: Iterable[range]) -> list[range]:
    """Return the parts of ``whole``, ascending, in none of ``spans``, which may overlap. Pure."""
    found, at = [], whole.start
    for span in (*sorted(spans, key=lambda span: span.start), range(whole.stop, whole.stop)):
        start = min(span.start, whole.stop)
        if at < start:
            found.append(range(at, start))
        at = max(at, span.stop)
    return found


def span_of(tensor: torch.Tensor) -> range | None:
    """Return the addresses of a tensor; ``None`` if it is empty, or has gaps for other tensors."""
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or reach != tensor.numel():
        return None
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
