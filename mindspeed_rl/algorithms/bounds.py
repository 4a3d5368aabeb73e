"""The one bound on log-ratios before they are exponentiated."""

from __future__ import annotations

import torch

# exp() of a larger log-ratio overflows fp32 long after a clip has made it irrelevant.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Within +-20 nats; outside there is no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
