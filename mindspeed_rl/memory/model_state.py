"""Bytes of parameters, gradient buffers and optimizer state of one rank.

What megatron-core 0.16 allocates (``distributed/param_and_grad_buffer.py``,
``optimizer/distrib_optimizer.py``): one buffer of gradients per chunk and kind (dense, expert). The
distributed optimizer also keeps parameters in a buffer, aligns every parameter in it to 64
elements, pads the whole to a multiple of lcm(data parallelism, 128), and gives each rank an even
share of it, whose optimizer state it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm, prod

from mindspeed_rl.models.rules import round_up
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

FP32_BYTES = 4
MOMENTS = 2  # exp_avg and exp_avg_sq
_PARAM_ALIGNMENT = 64  # elements
_BUCKET_ALIGNMENT = 128
_BIAS_OF_ROUTER = "router.expert_bias"  # a buffer of megatron-core, which nobody trains
_EXPERT = re.compile(r"\.experts\.")
_CHUNK = re.compile(r"^chunk\d+\.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
# The order in which megatron-core's modules register their parameters.
_ORDER = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.router",
    "mlp.experts.local_experts",
    "mlp.shared_experts",
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """Bytes of one rank.

    Attributes:
        parameters: in the training precision, padding of buffers included.
        grad_buffers: of all chunks.
        optimizer_at_start: main parameters where they are copies.
        moments: exp_avg and exp_avg_sq, which the first update makes.
        plain_parameters: parameters of a model that is not trained: no buffers.
    """

    parameters: int
    grad_buffers: int
    optimizer_at_start: int
    moments: int
    plain_parameters: int

    @property
    def optimizer(self) -> int:
        """Optimizer state after the first update."""
        return self.optimizer_at_start + self.moments


def registration_key(name: str) -> tuple[int, ...]:
    """Sorts local parameter names of one chunk as megatron-core registers them."""
    layer = _LAYER.match(name)
    if layer is None:
        top = ("embedding.", "", "decoder.final_layernorm.", "output_layer.")
        return (next(i for i, part in enumerate(top) if part and name.startswith(part)),)
    inside = layer[2]
    place = next(i for i, part in enumerate(_ORDER) if inside.startswith(part))
    expert = re.search(r"local_experts\.(\d+)\.", inside)
    tail = ("linear_fc1" not in inside, inside.endswith("bias"))
    return (1, int(layer[1]), place, int(expert[1]) if expert else 0, *map(int, tail))


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer: its parameters' sizes in elements, in the order of registration."""

    sizes: tuple[int, ...]
    shared_embedding: tuple[bool, ...]
    dp: int

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    def buckets(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """(padded size, [start, end) of every parameter in it) of each bucket.

        Parameters come in reverse order; an embedding that is shared between stages has a bucket
        of its own, so that both stages cut it alike.
        """
        multiple = lcm(self.dp, _BUCKET_ALIGNMENT)
        done: list[tuple[int, list[tuple[int, int]]]] = []
        current: list[tuple[int, int]] = []
        end = 0

        def close() -> None:
            nonlocal current, end
            done.append((round_up(end, multiple), current))
            current, end = [], 0

        for size, alone in zip(reversed(self.sizes), reversed(self.shared_embedding), strict=True):
            start = round_up(end, _PARAM_ALIGNMENT)
            if alone and current:
                end = start
                close()
                start = 0
            end = start + size
            current.append((start, end))
            if alone:
                close()
        if current:
            close()
        return done

    def padded_elements(self) -> int:
        return sum(size for size, _ in self.buckets())

    def owned_elements(self, dp_rank: int) -> int:
        """Elements of parameters in the share of a rank."""
        owned = 0
        for size, params in self.buckets():
            share = size // self.dp
            first, last = share * dp_rank, share * (dp_rank + 1)
            owned += sum(max(0, min(end, last) - max(start, first)) for start, end in params)
        return owned


def model_state(
    layout: MegatronLayout, rank: int, *, bf16: bool, distributed_optimizer: bool
) -> ModelState:
    """What a rank holds of the policy. Pure.

    Args:
        layout: spec and training layout.
        rank: global rank.
        bf16: parameters are bf16 and the optimizer keeps fp32 copies; else all is fp32.
        distributed_optimizer: whether ``--use-distributed-optimizer`` is on.
    """
    parallel = layout.parallel
    shapes = {n: s for n, s in layout.local_shapes(rank).items() if _BIAS_OF_ROUTER not in n}
    item = 2 if bf16 else FP32_BYTES
    dense_rank = parallel.coords(rank).cp + parallel.cp * parallel.coords(rank).dp
    expert_rank = parallel.expert_coords(rank).dp
    elements = padded = owned = 0
    for experts, buffer in _buffers(layout, shapes):
        elements += buffer.num_elements
        if distributed_optimizer:
            padded += buffer.padded_elements()
            owned += buffer.owned_elements(expert_rank if experts else dense_rank)
        else:
            padded += buffer.num_elements
            owned += buffer.num_elements
    return ModelState(
        parameters=padded * item,
        grad_buffers=padded * FP32_BYTES,
        optimizer_at_start=owned * FP32_BYTES if bf16 else 0,
        moments=owned * FP32_BYTES * MOMENTS,
        plain_parameters=elements * item,
    )


def _buffers(
    layout: MegatronLayout, shapes: Mapping[str, tuple[int, ...]]
) -> Iterable[tuple[bool, _Buffer]]:
    """(whether of experts, buffer) of every chunk; buffers without parameters do not exist."""
    parallel = layout.parallel
    chunks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        chunk = _CHUNK.match(name)
        prefix = chunk[0] if chunk else ""
        chunks.setdefault(prefix, {})[name.removeprefix(prefix)] = shape
    shared = layout.spec.tie_embeddings and parallel.pp > 1
    for named in chunks.values():
        for experts in (False, True):
            names = sorted(
                (n for n in named if (bool(_EXPERT.search(n)) and parallel.ep > 1) == experts),
                key=registration_key,
            )
            if names:
                yield (
                    experts,
                    _Buffer(
                        tuple(prod(named[n]) for n in names),
                        tuple(
                            shared and n.startswith(("embedding.", "output_layer.")) for n in names
                        ),
                        parallel.expert_dp if experts else parallel.dp * parallel.cp,
                    ),
                )
