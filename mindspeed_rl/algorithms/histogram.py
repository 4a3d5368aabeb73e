"""Counts magnitudes in fixed bins, which ranks add up, and reads quantiles off the counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.algorithms.types import SumOverRanks

BINS_PER_OCTAVE = 64
"""A bin is at most 1/64 (1.6 %) of its lower edge wide."""
_LOWEST, _HIGHEST = -30, 10  # powers of two between which there are bins
_STEP = 2**23 // BINS_PER_OCTAVE  # between the fp32 bits of two edges; fp32 has 23 bits of mantissa
_MASK = 2**31 - _STEP  # drops the sign and what is below an edge
_FIRST = (127 + _LOWEST) * BINS_PER_OCTAVE  # bits of the first edge in steps; 127: fp32's bias
_NUM_EDGES = (_HIGHEST - _LOWEST) * BINS_PER_OCTAVE + 1


def lower_edges() -> list[float]:
    """Return the lower edges of all bins: 0, then 2**-30 to 2**10 in 64 equal parts per octave.

    The last bin has everything above it, infinity and NaN.
    """
    octaves = (divmod(i, BINS_PER_OCTAVE) for i in range(_NUM_EDGES))
    return [0.0, *(math.ldexp(1 + part / BINS_PER_OCTAVE, _LOWEST + o) for o, part in octaves)]


@dataclass(frozen=True, slots=True)
class MagnitudeHistogram:
    """How many values have a magnitude in each bin; equal in every layout of the ranks.

    Attributes:
        counts: [bins] int64 on the device of the values, added to in place.
    """

    counts: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device) -> MagnitudeHistogram:
        """Return a histogram without values."""
        import torch

        return cls(torch.zeros(1 + _NUM_EDGES, dtype=torch.int64, device=device))

    def add(self, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Count [N] fp32 values. Local; the host does not wait for the device.

        Args:
            values: The values.
            counted: [N] bool, which of them; ``None``: all.
        """
        import torch

        # The bits of magnitudes are in the order of the magnitudes. What the mask leaves fits fp32,
        # which divides it exactly; shifts of integers have no kernel on the AI Cores of an NPU.
        edges = (values.detach().contiguous().view(torch.int32) & _MASK).float() / _STEP
        bins = (edges - (_FIRST - 1)).clamp(0, _NUM_EDGES).long()
        each = torch.ones_like(bins) if counted is None else counted.to(bins.dtype)
        self.counts.index_add_(0, bins, each)

    def upper_quantiles(self, shares: Sequence[float], reduce: SumOverRanks) -> list[float]:
        """Return, for each share, the largest edge that this part of all values reaches.

        It is the lower edge of the bin of the exact quantile: at most 1/64 below it, or 2**-30.
        Collective: one call of ``reduce``.

        Args:
            shares: Fractions above 0; each is at least one value.
            reduce: Sums an int64 tensor over the ranks that counted the other values.

        Returns:
            Minus infinity for each when there is no value.
        """
        counts = reduce(self.counts.clone()).tolist()
        reached = list(accumulate(reversed(counts)))  # from the largest bin down
        if not reached[-1]:
            return [-math.inf] * len(shares)
        edges = lower_edges()[::-1]
        wanted = [max(1, int(share * reached[-1])) for share in shares]
        return [edges[next(i for i, n in enumerate(reached) if n >= w)] for w in wanted]
