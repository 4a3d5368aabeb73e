"""Predicts bytes of parameters, gradient buffers and optimizer state of one rank.

megatron-core 0.16 has one buffer of gradients per chunk and kind (dense, expert). The distributed
optimizer also keeps parameters in a buffer, aligns every parameter in it to 64 elements, and pads
the buffer to a multiple of lcm(data parallelism, 128). Each rank keeps the optimizer state of an
even part of it (``param_and_grad_buffer.py``, ``distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from mindspeed_rl.core.layout import round_up
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

_FP32 = 4
_MOMENTS = 2  # exp_avg and exp_avg_sq
_PARAM_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128  # elements
# Elements of a bucket of gradients, at least, and per data-parallel rank.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
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


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The parameters that one buffer of gradients covers.

    Attributes:
        sizes: Elements of each parameter.
        dp: Ranks that share the optimizer state of the buffer.
    """

    sizes: tuple[int, ...]
    dp: int

    @property
    def padded(self) -> int:
        """Elements of the distributed optimizer's buffer."""
        aligned = sum(round_up(size, _PARAM_ALIGNMENT) for size in self.sizes)
        return round_up(aligned, lcm(self.dp, _BUFFER_ALIGNMENT))


def _buffers(layout: MegatronLayout, rank: int) -> Iterator[_Buffer]:
    """Yield the buffers of a rank: of each chunk one of experts and one of the other parameters."""
    parallel = layout.parallel
    found: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for name, shape in layout.local_shapes(rank).items():
        if _BIAS_OF_ROUTER not in name:
            chunk = _CHUNK.match(name)
            experts = ".experts." in name and parallel.ep > 1
            found[chunk[0] if chunk else "", experts].append(prod(shape))
    for (_, experts), sizes in found.items():
        yield _Buffer(tuple(sizes), parallel.expert_dp if experts else parallel.dp * parallel.cp)


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
    buffers = list(_buffers(layout, rank))
    item = 2 if bf16 else _FP32
    elements = sum(sum(buffer.sizes) for buffer in buffers)
    padded = owned = elements
    if distributed_optimizer:
        padded = sum(buffer.padded for buffer in buffers)
        owned = sum(sum(buffer.sizes) // buffer.dp for buffer in buffers)
    copies = owned * _FP32 if bf16 else 0
    return ModelState(
        parameters=padded * item,
        grad_buffers=padded * _FP32,
        optimizer_at_start=copies,
        optimizer=copies + owned * _FP32 * _MOMENTS,
        plain_parameters=elements * item,
    )


@dataclass(frozen=True, slots=True)
class SaveStaging:
    """Bytes that a rank takes while the state of a distributed optimizer is saved.

    Attributes:
        device: On the device.
        host: On the host.
    """

    device: int
    host: int


@lru_cache(maxsize=128)
def save_staging(layout: MegatronLayout, rank: int, *, buckets: bool) -> SaveStaging:
    """Predict what a save gathers of a distributed optimizer, as ``fully_reshardable``. Pure.

    For the main parameters and each moment in turn every rank sends its share of a bucket and
    receives the whole bucket on the device, in fp32, also where nobody shares it. On the host it
    has the shares of all three, the bucket twice (received and concatenated), and the whole of all
    buffers until the files are written (``get_parameter_state_dp_zero`` of megatron-core 0.16.1).

    Args:
        layout: Spec and training layout.
        rank: Global rank.
        buckets: Whether ``--overlap-grad-reduce`` cuts the buffers of the first chunk into buckets;
            without, each buffer is one bucket. The largest bucket is taken to have one parameter
            more than its limit.
    """
    device = passing = whole = 0
    for buffer in _buffers(layout, rank):
        bucket = buffer.padded
        if buckets:
            bucket = min(bucket, max(_BUCKET, _BUCKET_PER_RANK * buffer.dp) + max(buffer.sizes))
        share = -(-bucket // buffer.dp)
        device = max(device, bucket + share)
        passing = max(passing, 3 * share + 2 * bucket)
        whole += 3 * sum(buffer.sizes)
    return SaveStaging(device * _FP32, (passing + whole) * _FP32)
