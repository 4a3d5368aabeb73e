"""Shows the progress of a training run: lines, and on a terminal a bar below them."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import datetime, timedelta

from tqdm import tqdm

from mindspeed_rl.metrics.names import format_fields


class RunProgress:
    """Shows the steps done, the given fields, and the time left.

    A line is printed every ``log_interval`` steps and at the last one. A terminal has a bar below
    the lines.

    Args:
        total: Steps of the whole run.
        start: Steps done before this process started, at a resume; they do not count for the speed.
        desc: Description of what is running.
        is_writer: Whether this rank shows anything.
        log_interval: Steps per line.
    """

    def __init__(
        self,
        total: int,
        start: int,
        desc: str,
        is_writer: bool,
        log_interval: int = 1,
    ) -> None:
        assert 0 <= start <= total and log_interval > 0
        self._total, self._start, self._desc = total, start, desc
        self._is_writer, self._log_interval = is_writer, log_interval
        self._began_s = time.monotonic()
        self._bar = (
            tqdm(total=total, initial=start, desc=desc, unit="step", dynamic_ncols=True)
            if is_writer and sys.stderr.isatty()
            else None
        )

    def update(self, step: int, fields: Mapping[str, float]) -> None:
        """Show that ``step`` steps are done, with ``fields`` under short names.

        For example ``progress.update(12, headline(values))``.
        """
        if self._is_writer and (step % self._log_interval == 0 or step == self._total):
            tqdm.write(self._line(step, fields), file=sys.stderr)
            sys.stderr.flush()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the bar at its present state and end its line."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, step: int, fields: Mapping[str, float]) -> str:
        elapsed_s = time.monotonic() - self._began_s
        num_done = step - self._start
        left_s = elapsed_s / num_done * (self._total - step) if num_done > 0 else None
        parts = [
            f"{datetime.now():%H:%M:%S} {self._desc} {step}/{self._total}",
            format_fields(fields),
            f"elapsed {_hms(elapsed_s)}",
            f"left {_hms(left_s)}",
        ]
        return " | ".join(part for part in parts if part)


def _hms(seconds: float | None) -> str:
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))
