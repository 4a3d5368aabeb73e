"""Frees the memory of an engine that has no way to do so by itself."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mindspeed_rl.platforms.host_pages import advise_large_pages, discard_pages
from mindspeed_rl.platforms.storages import as_bytes, storages_of, take_memory


class ZeroedMemory:
    """Tensors that are freed as a whole and come back as zeros; every view of them stays valid.

    On a host the physical pages are returned and the addresses stay: coming back costs nothing, and
    pages that are never touched stay free. On a device the storages are resized.

    Args:
        tensors: Tensors to free, all of which have their memory now.
        refilled: Whether all memory is written as soon as it is back, so that large pages pay.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, refilled: bool = False) -> None:
        self._storages = [(s, s.nbytes()) for s in storages_of(tensors)]
        for storage, size in self._storages:
            if refilled and storage.device.type == "cpu":
                advise_large_pages(storage.data_ptr(), size)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._storages)

    def free(self) -> None:
        for storage, size in self._storages:
            if not storage.nbytes():
                continue
            on_host = storage.device.type == "cpu"
            if on_host and discard_pages(storage.data_ptr(), size):
                _zero_edges(as_bytes(storage))
            else:
                storage.resize_(0)

    def bring_back(self) -> None:
        try:
            for storage, size in self._storages:
                if not storage.nbytes():
                    take_memory(storage, size)
                    as_bytes(storage).zero_()
        except BaseException:
            self.free()
            raise


def _zero_edges(memory: torch.Tensor) -> None:
    """Zero the ends of a range, on pages shared with other memory, which are not discarded."""
    memory[: mmap.PAGESIZE].zero_()
    memory[-mmap.PAGESIZE :].zero_()


def kv_tensors(runner: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of the key/value cache, some of them several times."""
    compilation = runner.compilation_config
    layers = compilation.static_forward_context
    caches = (getattr(layer, "kv_cache", None) for layer in layers.values())
    yield from _tensors([runner.kv_caches, *caches])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
