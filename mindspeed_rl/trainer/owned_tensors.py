"""Finds the tensors of a training engine that belong to each owner of device memory.

With the distributed optimizer megatron-core keeps all parameters of a kind (dense, expert) in one
buffer and their gradients in another. Main parameters are views of the parameter buffer in fp32 and
copies in bf16. Owners are distinguished by storage, so every byte counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_rl.platforms.storages import not_among
from mindspeed_rl.trainer.optimizer import torch_optimizers


def parameters_of(modules: Sequence[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters of all chunks of a model; its buffers always stay on the device."""
    return [p for module in modules for p in module.parameters()]


def parameter_tensors(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the current data tensors of parameters."""
    return [p.data for p in parameters]


def gradient_tensors(
    models: Sequence[Any], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Return the gradient buffers of DistributedDataParallel chunks, and gradients kept outside."""
    buffers = [b.grad_data for m in models for b in (*m.buffers, *m.expert_parallel_buffers)]
    return buffers + [p.grad for p in parameters if p.grad is not None]


def optimizer_tensors(optimizer: Any, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the main parameters that are copies, and AdamW's moments after its first step.

    Step counters (one number each, which AdamW reads on the host) are not among them.
    """
    return not_among(_optimizer_tensors(optimizer), parameters)


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in torch_optimizers(optimizer):
        for group in part.param_groups:
            for param in group["params"]:
                yield param
                for value in part.state.get(param, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield value


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
