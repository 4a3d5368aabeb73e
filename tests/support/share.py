"""A share of what is too much for every run: N runs with shares 0 to N - 1 cover all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``count``-th row from the ``first``-th on."""

    first: int
    count: int

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of this share, in their order."""
        return list(rows)[self.first :: self.count]


def slow_but(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test of which all but ``quick`` are marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def unit_of(item: pytest.Item) -> str:
    """What is run or left out together, for the worlds that tests share.

    The file, where all of it is slow, unless it says ``slow("each")``; else all tests of the file
    with the same parameters.
    """
    module = item.getparent(pytest.Module)
    assert module is not None
    if any(mark.name == "slow" and not mark.args for mark in module.own_markers):
        return module.nodeid
    parameters = getattr(item, "callspec", None)
    return f"{module.nodeid}[{parameters.id}]" if parameters else item.nodeid


def parse_share(flag: str, text: str) -> Share:
    """``I/N`` of a flag.

    Raises:
        ValueError: not ``I/N`` with 0 <= I < N.
    """
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise ValueError(f"{flag} {text}: give I/N with I from 0 to N - 1, such as 0/3")
    return Share(int(first), int(count))
