"""Measures how long a restarted job takes from its failure to its next step, part by part.

The starter of a node sees when the first of its ranks is gone; ranks leave the times of what they
have reached among their notes. Nothing here imports torch.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: What ranks reach, in this order: see :func:`attempt.mark`.
REACHED = ("up", "engines", "loaded", "stepped")
MARK, PROCESS = "mark-", "process-"
_POLL_MS = 200.0


@dataclass(frozen=True, slots=True)
class FailureTimes:
    """Times of a failure, in seconds of the epoch.

    Attributes:
        began: The first rank of the node was gone, or where none was, the failure was noticed.
        noticed: A rank has told the cause; where none could, the launcher has ended.
        gone: The launcher and its ranks are gone.
    """

    began: float
    noticed: float
    gone: float


class ProcessWatch:
    """Waits for a launcher, and sees when the first of its ranks ends.

    Args:
        pid: The launcher, a child of this process.
        notes: Folder where ranks leave their process ids.
    """

    def __init__(self, pid: int, notes: Path) -> None:
        self._notes = notes
        self._poll = select.poll()
        self._open: dict[int, int] = {}  # descriptor -> process
        self._seen: set[str] = set()
        self._launcher = pid
        #: When the first rank was found ended; ``None``: none was.
        self.first_end: float | None = None
        self._add(pid)

    def wait(self) -> None:
        """Wait until a process ends, or for a moment. Local."""
        for note in self._notes.glob(f"{PROCESS}*"):
            if note.name not in self._seen:
                with suppress(OSError, ValueError):  # it is being written
                    self._add(int(note.read_text()))
                    self._seen.add(note.name)
        if not self._open:
            time.sleep(_POLL_MS / 1000)
        for descriptor, _ in self._poll.poll(_POLL_MS) if self._open else ():
            pid = self._open.pop(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            if pid != self._launcher and self.first_end is None:
                self.first_end = time.time()

    def failure(self, noted: Path) -> FailureTimes:
        """Return the times of the failure, now that the launcher has ended; close all. Local.

        Args:
            noted: The note of the rank that told the cause.
        """
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        gone = time.time()
        noticed = noted.stat().st_mtime if noted.is_file() else gone
        first = noticed if self.first_end is None else self.first_end
        return FailureTimes(min(first, noticed), noticed, gone)

    def _add(self, pid: int) -> None:
        with suppress(OSError):  # it is gone, or the kernel has no such descriptors
            descriptor = os.pidfd_open(pid)
            self._open[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)


def reached(notes: Path) -> dict[str, float]:
    """Return when the ranks of a node have reached what, in seconds of the epoch."""
    found = {}
    for name in REACHED:
        with suppress(OSError, ValueError):
            found[name] = float((notes / f"{MARK}{name}").read_text())
    return found


def recovery_line(
    restart: int, failure: FailureTimes, started: float, times: Mapping[str, float]
) -> str:
    """Return the line about a restart whose first step is done.

    Args:
        restart: Number of the restart.
        failure: The failure before it.
        started: When the new launcher was started.
        times: Result of :func:`reached`, with all of :data:`REACHED`.
    """
    borders = {
        "noticed": failure.noticed,
        "processes gone": failure.gone,
        "pause": started,
        "processes up": times["up"],
        "engines up": times["engines"],
        "state loaded": times["loaded"],
        "first step": times["stepped"],
    }
    parts, before = [], failure.began
    for name, at in borders.items():
        parts.append(f"{name} {max(0.0, at - before):.1f}")
        before = at
    whole = times["stepped"] - failure.began
    return (
        f"restart {restart}: the next step was done {whole:.1f} s after the failure: "
        f"{', '.join(parts)}"
    )
