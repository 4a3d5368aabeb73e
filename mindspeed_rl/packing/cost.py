"""The work of a sequence, by which plans give all ranks equal amounts of it."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.models.flops import context_values, sequence_flops
from mindspeed_rl.models.spec import ModelSpec

#: Operations that a device does while it sends or receives one byte. Assumed for one die of an
#: Atlas A3 and for an H100: 150e12 operations reached per second, over 100e9 bytes per second
#: between devices of a node.
FLOPS_PER_BYTE = 1500.0
_BYTES = 2  # of an element in bf16


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of one sequence of n tokens: ``linear n + quadratic n^2``, in FLOPs or any unit.

    Attributes:
        linear: Work per token.
        quadratic: Work of attention, per squared token.
        exchanged: Work that takes as long as sending the keys and values of one token to another
            rank that shares the sequence.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    exchanged: float = 0.0

    @classmethod
    def of_model(cls, spec: ModelSpec) -> SequenceCost:
        """Return the cost of a forward pass, in FLOPs; a backward pass costs twice as much."""
        values = context_values(spec)
        return cls(*sequence_flops(spec), exchanged=values * _BYTES * FLOPS_PER_BYTE)

    def of(self, length: int) -> float:
        """Return the work of one sequence of ``length`` tokens."""
        return length * (self.linear + self.quadratic * length)

    def share(self, length: int, size: int) -> float:
        """Return the work of each of ``size`` ranks that share a sequence.

        Each has an equal part of the work and receives the keys and values of the other parts.
        """
        return (self.of(length) + self.exchanged * length * (size - 1)) / size
