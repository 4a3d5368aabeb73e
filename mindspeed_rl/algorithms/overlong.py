"""What long responses cost (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations


def overlong_penalty(length: int, *, limit: int, buffer: int, weight: float) -> float:
    """Added to the reward: 0 up to ``limit - buffer`` tokens, then falling to ``-weight``.

    Soft overlong punishment: -weight (length - (limit - buffer)) / buffer within the buffer.

    Args:
        length: of the response, in tokens.
        limit: longest response.
        buffer: tokens before the limit where the penalty grows; at least 1.
        weight: the penalty at the limit.
    """
    over = length - (limit - buffer)
    return -weight * min(max(over / buffer, 0.0), 1.0)
