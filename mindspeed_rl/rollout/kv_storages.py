"""The memory of an engine's key/value cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def kv_storages(runner: Any) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """Every storage of the key/value cache with its size in bytes, each once."""
    layers = runner.compilation_config.static_forward_context.values()
    seen: set[int] = set()
    for tensor in _tensors([runner.kv_caches, *(getattr(x, "kv_cache", None) for x in layers)]):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage, storage.nbytes()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
