"""What the self-test of the loss tries, and how it judges what it finds.

Layouts, cuts into micro-batches, and losses with their settings; the worst difference of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from mindspeed_rl.algorithms.correction import CorrectionSettings
from mindspeed_rl.algorithms.losses import LossSettings
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings
from mindspeed_rl.config.algorithms import AGGREGATIONS, POLICY_LOSSES

LONGEST = 32
# Prompt and trained tokens: ragged, one sequence of a single trained token, one of none.
PAIRS = ((2, 9), (7, 3), (1, 1), (12, 20), (5, 0), (3, 2), (9, 11))

# The norm rule: sums in another order over ranks, and products in another order within layers.
METRIC_TOLERANCE = 1e-6
EXTREME_TOLERANCE = 5e-6  # of single tokens, where layers are cut
GRADIENT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE_CUT = 2e-5

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """A training layout; what is left of the world is data parallelism."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False

    @property
    def cuts_layers(self) -> bool:
        """Whether the numbers within a layer are summed in another order."""
        return self.tp * self.cp > 1

    def name(self, world: int) -> str:
        """As people write it."""
        dp = world // (self.tp * self.pp * self.cp)
        return f"dp {dp} x tp {self.tp}{' sp' if self.sp else ''} x pp {self.pp} x cp {self.cp}"


@dataclass(frozen=True, slots=True)
class Cut:
    """How the samples of a rank become micro-batches: by number, or packed up to some tokens."""

    samples: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        """As people write it."""
        return f"packed to {self.tokens} tokens" if self.tokens else f"micro-batch {self.samples}"


CUTS = (Cut(samples=1), Cut(samples=2), Cut(samples=8), Cut(tokens=48))


@dataclass(frozen=True, slots=True)
class Case:
    """A policy loss, or the critic's, with an aggregation."""

    loss: str
    aggregation: str

    @property
    def scale(self) -> float:
        """What rounding of the loss is relative to."""
        return _SCALES.get(self.aggregation, 1.0)

    @property
    def settings(self) -> LossSettings:
        """Every term is on: dual clip, KL, entropy, weights and rejection of whole sequences."""
        return LossSettings(
            policy_loss=self.loss,
            surrogate=SurrogateSettings(eps_lower=0.1, eps_upper=0.15, clip_ratio_c=1.3),
            aggregation=self.aggregation,
            longest=LONGEST,
            kl_beta=0.05,
            entropy_weight=0.01,
            correction=CorrectionSettings("mask", "geometric", 1.05, 0.9, "k3", "sequence", 0.09),
        )


# Metrics that the aggregation makes.
_SUMS = ("loss/policy", "value/loss")
# How many token means an aggregation adds up, which may cancel.
_TOKENS = sum(trained for _, trained in PAIRS)
_SCALES = {
    "token-sum": float(_TOKENS),
    "seq-mean-token-sum": _TOKENS / sum(trained > 0 for _, trained in PAIRS),
}
#: the critic's loss, with the values of a pass and the returns of GAE as its targets
VALUE = "value"
CASES = tuple(Case(loss, mode) for loss, mode in product((*POLICY_LOSSES, VALUE), AGGREGATIONS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: reduced metrics, and gradients by HF name, whole, on rank 0 only."""

    metrics: Mapping[str, float]
    gradients: Gradients


@dataclass(frozen=True, slots=True)
class Finding:
    """The worst differences of one layout and cut over its cases; on rank 0 only.

    Attributes:
        layout: name.
        cut: name.
        metric: largest difference of a metric over its tolerance, and whose.
        gradient: largest |g - g_ref| / |g_ref| over its tolerance, and whose.
    """

    layout: str
    cut: str
    metric: tuple[float, str]
    gradient: tuple[float, str]

    @property
    def holds(self) -> bool:
        """Whether both are within their tolerance; a NaN is not."""
        return self.metric[0] <= 1.0 and self.gradient[0] <= 1.0


def compare(
    where: str,
    cut: str,
    layout: Layout,
    found: Mapping[Case, Outcome],
    wanted: Mapping[Case, Outcome],
) -> Finding:
    """The worst of all cases. Local."""
    metrics = [e for c, o in found.items() for e in _metric_errors(layout, c, o, wanted[c])]
    limit = GRADIENT_TOLERANCE_CUT if layout.cuts_layers else GRADIENT_TOLERANCE
    gradients = [
        (error / limit, f"{c.loss} {c.aggregation} {name}")
        for c, o in found.items()
        for name, error in relative_errors(o.gradients, wanted[c].gradients).items()
    ]
    return Finding(where, cut, _worst(metrics), _worst(gradients))


def _metric_errors(
    layout: Layout, case: Case, found: Outcome, wanted: Outcome
) -> Iterator[tuple[float, str]]:
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, value in found.metrics.items():
        extreme = "max" in name and layout.cuts_layers
        limit = EXTREME_TOLERANCE if extreme else METRIC_TOLERANCE
        limit *= max(1.0, abs(wanted.metrics[name]), case.scale if name in _SUMS else 0.0)
        yield abs(value - wanted.metrics[name]) / limit, f"{case.loss} {case.aggregation} {name}"


def relative_errors(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """|g - g_ref| / |g_ref| by name, Euclidean norms in fp64."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - ref.double()).norm() / ref.double().norm())
        for name, ref in wanted.items()
    }


def _worst(errors: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest; a NaN is larger than everything."""
    return max(errors, key=lambda e: math.inf if math.isnan(e[0]) else e[0])
