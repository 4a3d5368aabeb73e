"""A share of what is too much for every run: N runs with shares 0 to N - 1 cover all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``count``-th row from the ``first``-th on."""

    first: int
    count: int

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of this share, in their order."""
        return list(rows)[self.first :: self.count]


ALL = Share(0, 1)


def parse_share(flag: str, text: str) -> Share:
    """``I/N`` of a flag.

    Raises:
        ValueError: not ``I/N`` with 0 <= I < N.
    """
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise ValueError(f"{flag} {text}: give I/N with I from 0 to N - 1, such as 0/3")
    return Share(int(first), int(count))
