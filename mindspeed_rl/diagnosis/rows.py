"""The doctor's findings (green, red with a fix, or a note) and how they are printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mindspeed_rl.core.ranks import counted


class Status(Enum):
    """The status of a finding. ``NOTE`` is worth knowing but no reason to stop."""

    GREEN = "ok"
    RED = "RED"
    NOTE = "note"


_COLOURS = {Status.GREEN: "32", Status.RED: "31;1", Status.NOTE: "33"}


@dataclass(frozen=True, slots=True)
class DoctorRow:
    """One finding.

    Attributes:
        status: Status of the finding; red rows make the doctor end with code 1.
        area: Heading under which the row is printed.
        what: Description of the finding.
        fix: Command to type or setting to change; every red row has one.
    """

    status: Status
    area: str
    what: str
    fix: str = ""


def green(area: str, what: str) -> DoctorRow:
    """Return a row for something that is right."""
    return DoctorRow(Status.GREEN, area, what)


def red(area: str, what: str, fix: str) -> DoctorRow:
    """Return a row for something that would make a run fail or be wrong."""
    return DoctorRow(Status.RED, area, what, fix)


def note(area: str, what: str, fix: str = "") -> DoctorRow:
    """Return a row for something that is worth knowing."""
    return DoctorRow(Status.NOTE, area, what, fix)


def lines(rows: Sequence[DoctorRow], *, colour: bool = False) -> Iterator[str]:
    """Yield the rows as lines for a terminal, by area in the order in which areas appear.

    A fix that several rows of an area share is told once, under the last of them.
    """
    for area in dict.fromkeys(row.area for row in rows):
        yield f"{area}:"
        shared = Counter(row.fix for row in rows if row.area == area)
        to_come = shared.copy()
        for row in (row for row in rows if row.area == area):
            word = f"{row.status.value:4}"
            if colour:
                word = f"\x1b[{_COLOURS[row.status]}m{word}\x1b[0m"
            yield f"  {word}  {row.what}"
            to_come[row.fix] -= 1
            if row.fix and not to_come[row.fix]:
                of_all = f" (of {shared[row.fix]} rows)" if shared[row.fix] > 1 else ""
                yield f"        fix{of_all}: {row.fix}"


def verdict(rows: Iterable[DoctorRow]) -> str:
    """Return the last line of the report, with the number of rows of each status."""
    found = [row.status for row in rows]
    greens, notes, reds = (found.count(s) for s in (Status.GREEN, Status.NOTE, Status.RED))
    return f"{greens} ok, {counted(notes, 'note')}, {reds} red" + ": fix the red ones first" * bool(
        reds
    )
