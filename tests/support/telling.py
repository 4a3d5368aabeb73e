"""What a run of tests tells beside pytest's own lines: failures at once, and what came too late."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

#: Environment variable: seconds since the epoch after which no slow test is begun.
END_AT = "TESTS_END_AT"
LEFT_OUT = "left out: the time of this run was over before its turn"


def leave_out_when_late(item: pytest.Item) -> None:
    """Skip a slow test, before its fixtures are made, when the time of the run is over."""
    end_at = float(os.environ.get(END_AT, "inf"))
    if item.get_closest_marker("slow") and time.time() > end_at:
        pytest.skip(LEFT_OUT)


class Telling:
    """A plugin of the process that prints.

    A failure is told when it happens, with its name and the end of its report: a run that is ended
    from outside prints no summary.
    """

    _NUM_LINES = 40

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._left_out: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each part of each test."""
        if report.skipped and LEFT_OUT in report.longreprtext:
            self._left_out[report.nodeid.split("::")[0]] += 1
        if not report.failed:
            return
        lines = report.longreprtext.splitlines()
        self._terminal.ensure_newline()
        self._terminal.write_line(f"FAILED {report.nodeid} ({report.when})")
        if (left_out := len(lines) - self._NUM_LINES) > 0:
            self._terminal.write_line(f"[{left_out} lines of it at the end of the run]")
        for line in lines[-self._NUM_LINES :]:
            self._terminal.write_line(f"    {line}")

    def pytest_terminal_summary(self) -> None:
        """Name the files whose slow tests were left out."""
        if self._left_out:
            self._terminal.section(f"{self._left_out.total()} slow tests left out for lack of time")
            for file, count in self._left_out.items():
                self._terminal.write_line(f"{count:4d} {file}")
