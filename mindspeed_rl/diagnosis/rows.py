"""A finding of the doctor: green, red with its fix, or a remark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Status(Enum):
    """``NOTE`` says something that is worth knowing and no reason to stop."""

    GREEN = "ok"
    RED = "RED"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class DoctorRow:
    """One finding.

    Attributes:
        status: red rows make the doctor end with code 1.
        area: heading that it is printed under.
        what: what was found.
        fix: what to type or change; every red row has one.
    """

    status: Status
    area: str
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.status is not Status.RED, f"{self.what}: a red row needs a fix"


def green(area: str, what: str) -> DoctorRow:
    """As it should be."""
    return DoctorRow(Status.GREEN, area, what)


def red(area: str, what: str, fix: str) -> DoctorRow:
    """A run would fail, or be wrong."""
    return DoctorRow(Status.RED, area, what, fix)


def note(area: str, what: str, fix: str = "") -> DoctorRow:
    """Worth knowing."""
    return DoctorRow(Status.NOTE, area, what, fix)


def lines(rows: Iterable[DoctorRow], *, colour: bool = False) -> Iterator[str]:
    """The rows for a terminal, by area in the order in which areas appear."""
    by_area: dict[str, list[DoctorRow]] = {}
    for row in rows:
        by_area.setdefault(row.area, []).append(row)
    paint = {Status.GREEN: "32", Status.RED: "31;1", Status.NOTE: "33"}
    for area, inside in by_area.items():
        yield f"{area}:"
        for row in inside:
            word = f"{row.status.value:4}"
            if colour:
                word = f"\x1b[{paint[row.status]}m{word}\x1b[0m"
            yield f"  {word}  {row.what}"
            if row.fix:
                yield f"        fix: {row.fix}"


def verdict(rows: Sequence[DoctorRow]) -> str:
    """The last line."""
    reds = sum(row.status is Status.RED for row in rows)
    notes = sum(row.status is Status.NOTE for row in rows)
    greens = len(rows) - reds - notes
    return f"{greens} ok, {notes} to know, {reds} red" + (": mend the red ones first" * bool(reds))


def as_json(rows: Iterable[DoctorRow]) -> list[dict[str, Any]]:
    """The rows as JSON objects."""
    return [asdict(row) | {"status": row.status.value} for row in rows]
