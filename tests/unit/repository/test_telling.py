"""What a run of tests tells: slow tests that came too late, and failures when they happen."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from support.telling import END_AT

_PLANTED = "MINDSPEED_RL_TEST_PLANTED_FAILURE"


@pytest.mark.slow
def test_one_that_is_slow() -> None:
    assert os.environ.get(_PLANTED) is None, "planted"


def test_one_that_is_quick() -> None:
    assert __name__


def _run(end_at: float, **environment: str) -> tuple[int, str]:
    """Run the two above; the exit status and what was printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "test_one"]
    done = subprocess.run(
        [*command, "-n", "1"],
        env=os.environ | environment | {END_AT: str(end_at)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_slow_tests_that_come_too_late_are_left_out_and_counted() -> None:
    status, text = _run(time.time() - 1)
    assert status == 0 and "1 passed, 1 skipped" in text
    assert " 1 slow tests left out for lack of time " in text
    assert "   1 tests/unit/repository/test_telling.py\n" in text


def test_in_time_all_run_and_a_failure_is_told_before_the_summary() -> None:
    status, text = _run(time.time() + 600, **{_PLANTED: "1"})
    assert status == 1 and "1 failed, 1 passed" in text and "left out" not in text
    at_once, _, _ = text.partition("= FAILURES =")
    assert "FAILED tests/unit/repository/test_telling.py::test_one_that_is_slow (call)" in at_once
    assert "AssertionError: planted" in at_once
