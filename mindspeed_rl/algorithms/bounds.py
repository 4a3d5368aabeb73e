"""Bounds that keep numbers finite: of log-ratios before an exponential, of divisors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# exp() of a larger log-ratio overflows fp32 long after a clip has made it irrelevant.
MAX_LOG_RATIO = 20.0
# Below this a standard deviation is rounding: what is divided by it becomes 0.
MIN_STD = 1e-4


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Within +-20 nats; outside there is no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
