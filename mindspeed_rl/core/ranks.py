"""Writes ranks, and numbers of them, in words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Write ranks in short: ``0-2, 5``."""
    # Consecutive ranks have the same distance to their index in sorted order.
    runs = groupby(enumerate(sorted(ranks)), key=lambda placed: placed[1] - placed[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join("-".join(map(str, dict.fromkeys((s[0], s[-1])))) for s in spans)
