"""Penalty for long responses (Yu et al. 2025, arXiv:2503.14476, section 3.4)."""

from __future__ import annotations


def overlong_penalty(length: int, *, limit: int, buffer: int, weight: float) -> float:
    """Return the penalty of the reward: 0 up to ``limit - buffer`` tokens, falling to ``-weight``.

    Soft overlong punishment: -weight (length - (limit - buffer)) / buffer within the buffer.

    Args:
        length: Length of the response, in tokens.
        limit: Length of the longest response, in tokens.
        buffer: Number of tokens before the limit where the penalty grows; at least 1.
        weight: Penalty at the limit.
    """
    over = length - (limit - buffer)
    return -weight * min(max(over / buffer, 0.0), 1.0)
