"""Predicts bytes of parameters, gradient buffers and optimizer state of one rank.

megatron-core 0.16 has one buffer of gradients per chunk and kind (dense, expert). The distributed
optimizer also keeps parameters in a buffer, aligns every parameter in it to 64 elements, and pads
the buffer to a multiple of lcm(data parallelism, 128). Each rank keeps the optimizer state of an
even part of it (``param_and_grad_buffer.py``, ``distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

_FP32 = 4
_MOMENTS = 2  # exp_avg and exp_avg_sq
_PARAM_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128  # elements
_BIAS_OF_ROUTER = "router.expert_bias"  # a buffer of megatron-core, not a trained parameter
_CHUNK = re.compile(r"^chunk\d+\.")


@dataclass(frozen=True, slots=True)
class ModelState:
    """Bytes of a model's state on one rank.

    Attributes:
        parameters: Parameters in the training precision, padding of buffers included.
        grad_buffers: Gradient buffers of all chunks.
        optimizer_at_start: Optimizer state before the first update: main parameters if copies.
        optimizer: Optimizer state with both moments, which the first update creates.
        plain_parameters: Parameters of a model that is not trained and has no buffers.
    """

    parameters: int
    grad_buffers: int
    optimizer_at_start: int
    optimizer: int
    plain_parameters: int


@lru_cache(maxsize=128)
def model_state(
    layout: MegatronLayout, rank: int, *, bf16: bool, distributed_optimizer: bool
) -> ModelState:
    """Predict the state of a trained model on a rank, with an even optimizer partition. Pure.

    Args:
        layout: Spec and training layout.
        rank: Global rank.
        bf16: Whether parameters are bf16 with fp32 copies in the optimizer; else all is fp32.
        distributed_optimizer: Whether ``--use-distributed-optimizer`` is on.
    """
    parallel = layout.parallel
    buffers: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for name, shape in layout.local_shapes(rank).items():
        if _BIAS_OF_ROUTER not in name:
            chunk = _CHUNK.match(name)
            experts = ".experts." in name and parallel.ep > 1
            buffers[chunk[0] if chunk else "", experts].append(prod(shape))
    item = 2 if bf16 else _FP32
    elements = sum(map(sum, buffers.values()))
    padded = owned = elements
    if distributed_optimizer:
        padded = owned = 0
        for (_, experts), sizes in buffers.items():
            dp = parallel.expert_dp if experts else parallel.dp * parallel.cp
            aligned = sum(round_up(size, _PARAM_ALIGNMENT) for size in sizes)
            padded += round_up(aligned, lcm(dp, _BUFFER_ALIGNMENT))
            owned += sum(sizes) // dp
    copies = owned * _FP32 if bf16 else 0
    return ModelState(
        parameters=padded * item,
        grad_buffers=padded * _FP32,
        optimizer_at_start=copies,
        optimizer=copies + owned * _FP32 * _MOMENTS,
        plain_parameters=elements * item,
    )
