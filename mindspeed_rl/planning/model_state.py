"""Predicts bytes of parameters, gradient buffers and optimizer state of one rank.

The buffers are those of :mod:`mindspeed_rl.handover.buffers`. With the distributed optimizer each
rank keeps the optimizer state of an even part of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mindspeed_rl.algorithms.lora import NO_ADAPTERS, LoraSettings
from mindspeed_rl.handover.buffers import buffers_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

_FP32 = 4
_MOMENTS = 2  # exp_avg and exp_avg_sq
_FILES_OF_A_RANK = 2  # written at the same time in a checkpoint


@dataclass(frozen=True, slots=True)
class ModelState:
    """Bytes of a model's state on one rank.

    Attributes:
        parameters: Parameters in the training precision, padding of buffers included.
        grad_buffers: Gradient buffers of all chunks.
        optimizer_at_start: Optimizer state before the first update: main parameters if copies.
        optimizer: Optimizer state with both moments, which the first update creates.
        plain_parameters: Parameters of a model that is not trained and has no buffers; of adapters
            their own parameters, without those of the base.
    """

    parameters: int
    grad_buffers: int
    optimizer_at_start: int
    optimizer: int
    plain_parameters: int


@lru_cache(maxsize=128)
def model_state(
    layout: MegatronLayout,
    rank: int,
    *,
    bf16: bool,
    distributed_optimizer: bool,
    lora: LoraSettings = NO_ADAPTERS,
) -> ModelState:
    """Predict the state of a trained model on a rank, with an even optimizer partition. Pure.

    Args:
        layout: Spec and training layout.
        rank: Global rank.
        bf16: Whether parameters are bf16 with fp32 copies in the optimizer; else all is fp32.
        distributed_optimizer: Whether ``--use-distributed-optimizer`` is on.
        lora: Adapters, which are then all that has gradients and optimizer state.
    """
    buffers = list(buffers_of(layout, rank, lora))
    frozen = sum(size for b in buffers_of(layout, rank, NO_ADAPTERS) for size in b.sizes)
    frozen *= lora.is_on
    item = 2 if bf16 else _FP32
    elements = sum(sum(buffer.sizes) for buffer in buffers)
    padded = owned = elements
    if distributed_optimizer:
        padded = sum(buffer.padded for buffer in buffers)
        owned = sum(sum(buffer.sizes) // buffer.dp for buffer in buffers)
    copies = owned * _FP32 if bf16 else 0
    return ModelState(
        parameters=(padded + frozen) * item,
        grad_buffers=padded * _FP32,
        optimizer_at_start=copies,
        optimizer=copies + owned * _FP32 * _MOMENTS,
        plain_parameters=elements * item,
    )


def save_host_bytes(
    layout: MegatronLayout,
    rank: int,
    *,
    bf16: bool,
    with_optimizer: bool,
    in_background: bool,
    on_host: bool,
    lora: LoraSettings = NO_ADAPTERS,
) -> int:
    """Predict the host memory that the save of a model takes beside its state. Pure.

    A rank writes the optimizer state that it owns and its part of the weights; nothing is gathered,
    and the device needs no memory. In the background all of that is copied to the host first.
    Otherwise each file that is being written has a copy of one tensor at a time.

    Args:
        layout: Spec and training layout.
        rank: Global rank.
        bf16: Whether parameters are bf16 with fp32 copies in the optimizer; else all is fp32.
        with_optimizer: Whether main parameters and moments are kept.
        in_background: Whether ``--async-save`` is on.
        on_host: Whether the weights are on the host; megatron-core copies the part of a rank.
        lora: Adapters, which are then all that is saved.
    """
    shares = [
        (buffer, -(-sum(buffer.sizes) // buffer.dp)) for buffer in buffers_of(layout, rank, lora)
    ]
    elements = sum(share for _, share in shares)
    weights = elements * (2 if bf16 else _FP32)
    stored = weights + (elements * _FP32 * (1 + _MOMENTS) if with_optimizer else 0)
    if in_background:
        return stored
    largest = max((min(max(buffer.sizes), share) for buffer, share in shares), default=0)
    return min(stored, _FILES_OF_A_RANK * largest * _FP32 + (weights if on_host else 0))
