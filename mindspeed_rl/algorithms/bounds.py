"""Bounds that keep numbers finite: of log-ratios before an exponential, and of divisors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The exponential of a larger log-ratio overflows fp32 long after a clip made it irrelevant.
MAX_LOG_RATIO = 20.0
# A smaller standard deviation is rounding error: what would be divided by it becomes 0.
MIN_STD = 1e-4


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp log-ratios to +-20 nats; values outside have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
