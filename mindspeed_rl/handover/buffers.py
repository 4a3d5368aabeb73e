"""The buffers in which megatron-core keeps the parameters and gradients of a rank.

megatron-core 0.16 has one buffer of gradients per chunk and kind (dense, expert). The distributed
optimizer also keeps parameters in a buffer, aligns every parameter in it to 64 elements, and pads
the buffer to a multiple of lcm(data parallelism, 128). Each rank updates an even part of it and
gathers the others' parts (``param_and_grad_buffer.py``, ``distrib_optimizer.py``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm, prod

from mindspeed_rl.adapters.plan import plan_adapters
from mindspeed_rl.algorithms.lora import LoraSettings
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

_PARAM_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128  # elements
_BIAS_OF_ROUTER = "router.expert_bias"  # a buffer of megatron-core, not a trained parameter
_CHUNK = re.compile(r"^chunk\d+\.")


@dataclass(frozen=True, slots=True)
class ParameterBuffer:
    """The parameters that one buffer of gradients covers.

    Attributes:
        sizes: Elements of each parameter.
        dp: Ranks that share the optimizer state of the buffer.
        filler: Elements of the parameters that no model file has: padding of the vocabulary.
    """

    sizes: tuple[int, ...]
    dp: int
    filler: int = 0

    @property
    def padded(self) -> int:
        """Elements of the distributed optimizer's buffer."""
        aligned = sum(round_up(size, _PARAM_ALIGNMENT) for size in self.sizes)
        return round_up(aligned, lcm(self.dp, _BUFFER_ALIGNMENT))

    @property
    def gathered(self) -> int:
        """Elements that a rank receives when the buffer's parameters are gathered."""
        return self.padded - self.padded // self.dp

    @property
    def trained(self) -> int:
        """Elements of the model in the buffer."""
        return sum(self.sizes) - self.filler


def buffers_of(layout: MegatronLayout, rank: int, lora: LoraSettings) -> Iterator[ParameterBuffer]:
    """Yield the buffers of a rank: of each chunk one of experts and one of the other parameters.

    Args:
        layout: Spec and training layout.
        rank: Global rank.
        lora: Adapters, which are then all that has buffers.
    """
    parallel = layout.parallel
    found: dict[tuple[str, bool], list[str]] = defaultdict(list)
    shapes: Mapping[str, tuple[int, ...]] = layout.local_shapes(rank)
    filler: Mapping[str, int] = layout.local_padding(rank)
    if lora.is_on:
        shapes, filler = plan_adapters(layout, rank, lora).factor_shapes(lora.lora_rank), {}
    for name in shapes:
        if _BIAS_OF_ROUTER not in name:
            chunk = _CHUNK.match(name)
            experts = ".experts." in name and parallel.ep > 1
            found[chunk[0] if chunk else "", experts].append(name)
    for (_, experts), names in found.items():
        yield ParameterBuffer(
            tuple(prod(shapes[name]) for name in names),
            parallel.expert_dp if experts else parallel.dp * parallel.cp,
            sum(filler.get(name, 0) for name in names),
        )
