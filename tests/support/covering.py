"""Covering arrays: few combinations of many choices, among them every pair of choices."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

Row = tuple[Hashable, ...]


def pairs_of(row: Row) -> set[tuple[int, Hashable, int, Hashable]]:
    """Every two factors of a row with their values."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering_array(rows: Sequence[Row]) -> list[Row]:
    """Some of the allowed rows in which every pair of values occurs that occurs in any.

    Greedy: the row with the most pairs that are still missing, the first of several.

    Args:
        rows: all allowed combinations, a value of each factor.
    """
    number: dict[tuple[int, Hashable, int, Hashable], int] = {}
    masks = []
    for row in rows:
        bits = (
            1 << number.setdefault(pair, len(number)) for pair in sorted(pairs_of(row), key=str)
        )
        masks.append(sum(bits))
    missing, chosen = (1 << len(number)) - 1, []
    while missing:
        gains = [(mask & missing).bit_count() for mask in masks]
        best = gains.index(max(gains))
        chosen.append(rows[best])
        missing &= ~masks[best]
    return chosen
