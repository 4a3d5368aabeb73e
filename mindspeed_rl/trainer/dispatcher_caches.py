"""The tensors that the token dispatchers of experts keep between micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class DispatcherCaches:
    """The tensors that token dispatchers keep of the last micro-batch: routing maps, probabilities.

    Args:
        modules: Chunks of a freshly built model, whose dispatchers have cached nothing yet.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._parts = [
            (holder, frozenset(name for name, _ in _tensors_of(holder)))
            for module in modules
            for layer in module.modules()
            for holder in _dispatchers(layer)
        ]

    def tensors(self) -> list[torch.Tensor]:
        return [t for holder, own in self._parts for n, t in _tensors_of(holder) if n not in own]

    def drop(self) -> None:
        """Drop the kept tensors; the next micro-batch creates its own."""
        for holder, own in self._parts:
            for name, _ in _tensors_of(holder):
                if name not in own:
                    setattr(holder, name, None)


def _dispatchers(layer: Any) -> Iterator[Any]:
    dispatcher = getattr(layer, "token_dispatcher", None)
    if dispatcher is not None:
        yield dispatcher
        home = type(dispatcher).__module__
        yield from (v for v in vars(dispatcher).values() if type(v).__module__ == home)


def _tensors_of(holder: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, v) for name, v in vars(holder).items() if isinstance(v, torch.Tensor)]
