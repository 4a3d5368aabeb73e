"""Layers of each pipeline stage: even and uneven splits, interleaved chunks, empty slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_rl.core.errors import UsageError


class LayerPlace(NamedTuple):
    """The place of a layer: pipeline stage, chunk of that stage, number within the chunk."""

    stage: int
    chunk: int
    local: int


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The number of layers of each chunk, in model order; chunk ``i`` is on stage ``i % pp``.

    Attributes:
        pp: Number of pipeline stages.
        layers_per_chunk: Numbers of layers, ``pp x vpp`` of them.
    """

    pp: int
    layers_per_chunk: tuple[int, ...]

    @property
    def vpp(self) -> int:
        """Number of chunks on every stage."""
        return len(self.layers_per_chunk) // self.pp

    @property
    def num_layers(self) -> int:
        return sum(self.layers_per_chunk)

    @property
    def is_even(self) -> bool:
        """Whether all chunks have the same number of layers."""
        return len(set(self.layers_per_chunk)) == 1

    def describe(self) -> str:
        """Describe uneven stages and chunks in words; empty for an even layout without chunks."""
        if self.is_even and self.vpp == 1:
            return ""
        counts = ",".join(map(str, self.layers_per_chunk))
        if self.vpp == 1:
            return f"layers per stage {counts}"
        return f"vpp {self.vpp}, layers per chunk {counts}"

    def place_of(self, layer: int) -> LayerPlace:
        """The place of a layer, which is numbered over the whole model."""
        first = 0
        for position, count in enumerate(self.layers_per_chunk):
            if first <= layer < first + count:
                return LayerPlace(position % self.pp, position // self.pp, layer - first)
            first += count
        raise IndexError(f"layer {layer} is not one of {self.num_layers}")

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """The layers of a chunk, numbered over the whole model."""
        position = chunk * self.pp + stage
        first = sum(self.layers_per_chunk[:position])
        return range(first, first + self.layers_per_chunk[position])


def even_stages(
    num_layers: int, pp: int = 1, vpp: int = 1, noop_layers: Sequence[int] = ()
) -> StageLayout:
    """Split layer slots evenly over the chunks; the slots in ``noop_layers`` stay empty.

    Args:
        num_layers: Number of layers of the model, without the empty slots.
        pp: Number of pipeline stages.
        vpp: Number of chunks of each stage.
        noop_layers: Numbers of the empty slots among all ``num_layers + len(noop_layers)`` slots.

    Raises:
        UsageError: The chunks do not divide the slots, or a number is outside the slots.
    """
    slots = num_layers + len(noop_layers)
    if pp < 1 or vpp < 1:
        raise UsageError(f"--pipeline-model-parallel-size {pp}: must be at least 1")
    if slots % (pp * vpp):
        and_noop = f" and {len(noop_layers)} --noop-layers" if noop_layers else ""
        chunks = f" x {vpp} chunks per stage" if vpp > 1 else ""
        raise UsageError(
            f"--pipeline-model-parallel-size {pp}{chunks} does not divide the model's "
            f"{num_layers} layers{and_noop}; allowed: the divisors of {slots}, or give the layers "
            "of each stage with --num-layer-list"
        )
    empty = set(noop_layers)
    if len(empty) != len(noop_layers) or not empty <= set(range(slots)):
        raise UsageError(
            f"--noop-layers {','.join(map(str, noop_layers))}: must be different numbers below "
            f"{slots} = {num_layers} layers + {len(noop_layers)}"
        )
    size = slots // (pp * vpp)
    counts = [
        sum(1 for slot in range(i * size, (i + 1) * size) if slot not in empty)
        for i in range(pp * vpp)
    ]
    return StageLayout(pp, tuple(counts))


def accounted_stages(
    num_layers: int, pp: int, vpp: int = 1, *, embedding: bool, loss: bool
) -> StageLayout:
    """Split layers evenly, with the embedding, the loss or both counted as one more layer.

    The first chunk has one layer less for the embedding, the last one for the loss. Source:
    ``megatron.core.transformer.transformer_block.get_num_layers_to_build``.

    Args:
        num_layers: Number of layers of the model.
        pp: Number of pipeline stages.
        vpp: Number of chunks of each stage.
        embedding: Value of ``--account-for-embedding-in-pipeline-split``.
        loss: Value of ``--account-for-loss-in-pipeline-split``.

    Raises:
        UsageError: The chunks do not divide the layers.
    """
    slots = num_layers + embedding + loss
    if slots % (pp * vpp) or slots < pp * vpp:
        flags = [
            f"--account-for-{name}-in-pipeline-split"
            for name, given in (("embedding", embedding), ("loss", loss))
            if given
        ]
        chunks = f" x {vpp} chunks per stage" if vpp > 1 else ""
        raise UsageError(
            f"{' '.join(flags)}: --pipeline-model-parallel-size {pp}{chunks} does not divide "
            f"{slots} = {num_layers} layers + {slots - num_layers}; allowed: the divisors of "
            f"{slots}, or give the layers of each stage with --num-layer-list"
        )
    counts = [slots // (pp * vpp)] * (pp * vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    return StageLayout(pp, tuple(counts))


def filled_slots(
    num_layers: int, pp: int, vpp: int, noop_layers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """For each chunk of :func:`even_stages`, the numbers of its slots that hold a layer."""
    size = (num_layers + len(noop_layers)) // (pp * vpp)
    empty = set(noop_layers)
    return tuple(
        tuple(slot for slot in range(size) if chunk * size + slot not in empty)
        for chunk in range(pp * vpp)
    )


def listed_stages(num_layers: int, pp: int, counts: Sequence[int]) -> StageLayout:
    """Make a layout of given numbers of layers in model order: ``pp`` of them, or a multiple.

    Raises:
        UsageError: The counts do not fit the stages or the model.
    """
    text = ",".join(map(str, counts))
    if not counts or len(counts) % pp:
        raise UsageError(
            f"--num-layer-list {text}: {len(counts)} numbers; needed: "
            f"--pipeline-model-parallel-size {pp} of them, or a multiple of it (chunks of an "
            "interleaved schedule, in the order of the model)"
        )
    if sum(counts) != num_layers or min(counts) < 0:
        raise UsageError(
            f"--num-layer-list {text} has {sum(counts)} layers, the model {num_layers}; the "
            "numbers must not be negative and must sum to the layers of the model"
        )
    return StageLayout(pp, tuple(counts))
