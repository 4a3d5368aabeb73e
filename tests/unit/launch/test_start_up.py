"""Stages of a job: a line with seconds, lines while it lasts, none for what is quick or fails."""

from __future__ import annotations

import re
import time

import pytest

from mindspeed_rl.launch.start_up import LEAST_S, stage, start_stage


def test_a_stage_that_takes_long_is_told_while_it_runs_and_at_its_end() -> None:
    told: list[str] = []
    with stage(told.append, "inference engine", beat_s=0.05, least_s=0.0):
        while len(told) < 2:
            time.sleep(0.01)
    assert all(re.fullmatch(r"inference engine: \d+ s so far", line) for line in told[:-1])
    assert re.fullmatch(r"inference engine: \d+\.\d s", told[-1])
    lines = len(told)
    time.sleep(0.1)
    assert len(told) == lines, "nothing is told after its end"


def test_a_quick_stage_has_no_line() -> None:
    told: list[str] = []
    with stage(told.append, "process groups", least_s=60.0):
        pass
    assert told == []


def test_a_stage_that_fails_leaves_the_word_to_its_error() -> None:
    told: list[str] = []
    with pytest.raises(KeyError), stage(told.append, "prompts", least_s=0.0):
        raise KeyError("x")
    assert told == []


class _Job:
    def __init__(self) -> None:
        self.told: list[str] = []

    def log_rank0(self, *lines: str) -> None:
        self.told += lines


def test_a_function_of_a_job_is_a_stage() -> None:
    @start_stage("export")
    def export(job: _Job, target: str, *, step: int) -> str:
        time.sleep(LEAST_S)
        return f"{target}/{step}"

    job = _Job()
    assert export(job, "hf", step=7) == "hf/7"
    assert len(job.told) == 1 and job.told[0].startswith("export: ")
    assert export.__name__ == "export"
