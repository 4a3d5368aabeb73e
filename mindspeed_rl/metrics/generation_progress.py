"""Shows how far a pass of generation is: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from tqdm import tqdm

LINE_S = 30.0
"""Seconds between two lines of a log file."""


class GenerationProgress:
    """Shows the responses that an engine has finished.

    Ranks do not tell each other how far they are, so the numbers are those of one engine, and the
    line says of how many.

    Args:
        what: What the engine does, such as ``generating``.
        total: Responses that it is to generate.
        engines: Number of engines, each of which has a part of the responses.
        shown: Whether this rank shows anything.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        what: str,
        total: int,
        engines: int = 1,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._engines = what, total, engines
        self._shown, self._clock = shown and total > 0, clock
        self._done = 0
        self._began = self._last_line = clock()
        self._bar: tqdm[None] | None = None
        if self._shown and _draws_bars(sys.stderr):
            self._bar = tqdm(total=total, desc=what, unit="", leave=False, dynamic_ncols=True)

    def add(self, count: int) -> None:
        """Count responses that have finished. Local; call it after every step of the engine."""
        self._done += count
        if not self._shown:
            return
        # Requests that came from other engines are more than this one was to generate.
        self._total = max(self._total, self._done)
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.update(count)
        elif self._clock() - self._last_line >= LINE_S:
            self._last_line = self._clock()
            tqdm.write(self._line(), file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the bar. Local."""
        if self._bar is not None:
            self._bar.close()

    def _line(self) -> str:
        where = f" on the first of {self._engines} engines" if self._engines > 1 else ""
        seconds = self._clock() - self._began
        now = f"{datetime.now():%H:%M:%S}"
        return f"{now} {self._what} {self._done}/{self._total}{where}, {seconds:.0f} s"


def _draws_bars(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal with a width; some of containers have none."""
    if not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no file behind it, as in a notebook
        return True
