"""The result of a stage, as its process writes it and as the report reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from mindspeed_rl.core.errors import UsageError

FILE = "stages.jsonl"
Figures = dict[str, float]


class StageStatus(Enum):
    """How a stage ended."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    STARTED = "started"


@dataclass(frozen=True, slots=True)
class Result:
    """A stage.

    Attributes:
        stage: Its name.
        status: How it ended; ``STARTED`` only until its process says more.
        seconds: Wall time, 0 if it did not run.
        figures: Numbers by name; the end of a name is its unit.
        note: Why it failed or was skipped, or what the numbers do not say.
    """

    stage: str
    status: StageStatus
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return asdict(self) | {"status": self.status.value}


class StageFailed(Exception):
    """What a stage computed is wrong; the text says how."""


@dataclass(slots=True)
class Notes:
    """What a running stage has found so far."""

    figures: Figures = field(default_factory=dict)
    text: str = ""


class Recorder:
    """Appends results to a file as soon as they are known, because a process may die at any time.

    Args:
        folder: Folder of the check.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def write(self, result: Result) -> None:
        """Append a result."""
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(result.as_json()) + "\n")

    def ended(self, job: str, why: str) -> None:
        """Append why a process ended before its last stage."""
        self.write(Result(end_of(job), StageStatus.FAILED, note=why))

    @contextmanager
    def stage(self, name: str) -> Iterator[Notes]:
        """Run the block as a stage; an error is its result, and goes on to the caller."""
        self.write(Result(name, StageStatus.STARTED))
        notes, begin = Notes(), time.perf_counter()
        try:
            yield notes
        except BaseException as error:
            what = described(error)
            seconds = time.perf_counter() - begin
            self.write(Result(name, StageStatus.FAILED, seconds, notes.figures, what))
            raise
        seconds = time.perf_counter() - begin
        self.write(Result(name, StageStatus.OK, seconds, notes.figures, notes.text))


def end_of(job: str) -> str:
    """Return the name under which the end of a process is kept beside its stages."""
    return f"end of {job}"


def described(error: BaseException) -> str:
    """Return the first line of an error that says something, with the kind of an unexpected one."""
    if isinstance(error, (StageFailed, UsageError)):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def read_results(folder: Path) -> dict[str, Result]:
    """Return the last result of every stage that began, by its name."""
    file = folder / FILE
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        found[row["stage"]] = Result(**row | {"status": StageStatus(row["status"])})
    return found
