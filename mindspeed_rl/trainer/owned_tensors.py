"""Which tensors of a training engine belong to which owner of device memory.

With the distributed optimizer megatron-core keeps all parameters of a kind (dense, expert) in one
buffer and their gradients in another; main parameters of an fp32 model are views of the former,
those of a bf16 model are copies. Owners are told apart by storage, so every byte counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_rl.platforms.storages import not_among
from mindspeed_rl.trainer.optimizer import torch_optimizers


def parameters_of(modules: Sequence[Any]) -> list[torch.nn.Parameter]:
    """Parameters of the chunks of a model. Buffers (rotary tables, router biases) stay put."""
    return [p for module in modules for p in module.parameters()]


def parameter_tensors(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """What the parameters hold now."""
    return [p.data for p in parameters]


def gradient_tensors(
    models: Sequence[Any], parameters: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Gradient buffers of DistributedDataParallel chunks, and gradients beside them."""
    buffers = [b.grad_data for m in models for b in (*m.buffers, *m.expert_parallel_buffers)]
    return buffers + [p.grad for p in parameters if p.grad is not None]


def optimizer_tensors(optimizer: Any, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Main parameters that are copies, and the moments of AdamW once its first step made them.

    Step counters (one number each, which AdamW reads on the host) stay where they are.
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
    """What token dispatchers keep of the last micro-batch: routing maps and probabilities.

    Args:
        modules: chunks of the model, freshly built: what their dispatchers hold now is theirs.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._parts = [
            (holder, frozenset(name for name, _ in _tensors_of(holder)))
            for module in modules
            for layer in module.modules()
            for holder in _dispatchers(layer)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """What is kept now."""
        return [t for holder, own in self._parts for n, t in _tensors_of(holder) if n not in own]

    def drop(self) -> None:
        """Let go of it; the next micro-batch brings its own."""
        for holder, own in self._parts:
            for name, _ in _tensors_of(holder):
                if name not in own:
                    setattr(holder, name, None)


def _dispatchers(layer: Any) -> Iterator[Any]:
    """The dispatcher of a layer, and the manager inside that some kinds have."""
    dispatcher = getattr(layer, "token_dispatcher", None)
    if dispatcher is not None:
        yield dispatcher
        home = type(dispatcher).__module__
        yield from (v for v in vars(dispatcher).values() if type(v).__module__ == home)


def _tensors_of(holder: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, v) for name, v in vars(holder).items() if isinstance(v, torch.Tensor)]
