"""When a run saves and ends: by minutes, before a limit, at a signal; the same on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_rl.checkpoint.save_clock import (
    Due,
    SaveClock,
    Votes,
    due_after,
    votes_are_taken,
)
from mindspeed_rl.config.training import CheckpointConfig

SAVES = CheckpointConfig(save="somewhere")


class Seconds:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_of(options: CheckpointConfig, durations: list[float], saves_s: float) -> list[int]:
    """The steps after which a run saves; the last one is where it ends by itself."""
    seconds = Seconds()
    clock = SaveClock(0.0, seconds)
    seconds.now += 50.0  # the start of the run
    clock.begin_steps()
    found = []
    for step, duration in enumerate(durations, 1):
        seconds.now += duration
        clock.end_step()
        votes = clock.votes(options, asked=False, keeps_time=True)
        due = due_after(options, len(durations), step, votes)
        if due.save:
            found.append(step)
            seconds.now += saves_s
            clock.end_save()
        if due.stop:
            assert "--exit-duration-in-mins" in due.stop
            break
    return found


def test_minutes_count_from_the_end_of_the_last_save() -> None:
    by_minutes = replace(SAVES, save_interval_minutes=1.0)
    assert steps_of(by_minutes, [25.0] * 9, saves_s=20.0) == [3, 6, 9]
    both = replace(by_minutes, save_interval=4)
    assert steps_of(both, [25.0] * 9, saves_s=20.0) == [3, 4, 7, 8, 9]


def test_a_run_ends_before_its_limit_with_room_for_a_step_and_a_save() -> None:
    """50 s of start; steps of 20 s, one of 40 s; saves of 30 s."""
    limited = replace(SAVES, exit_duration_in_mins=5.0, save_interval=3)
    assert steps_of(limited, [20.0, 20.0, 40.0, *[20.0] * 20], saves_s=30.0) == [3, 6, 7]
    # Step 7 ends after 270 s, and another step and two saves would end after 370 s.


def test_time_before_a_restart_counts_for_the_limit() -> None:
    seconds = Seconds()
    limited = replace(SAVES, exit_duration_in_mins=1.0)
    for elapsed_s, vote in ((0.0, 0), (55.0, 1)):
        clock = SaveClock(elapsed_s, seconds)
        seconds.now += 10.0
        assert clock.votes(limited, asked=False, keeps_time=True) == Votes(limit=vote)


def test_only_one_clock_counts_and_any_signal_does() -> None:
    options = replace(
        SAVES, save_interval_minutes=1.0, exit_duration_in_mins=1.0, exit_signal_handler=True
    )
    seconds = Seconds()
    clock = SaveClock(0.0, seconds)
    seconds.now += 600.0
    assert clock.votes(options, asked=False, keeps_time=True) == Votes(1, 1, 0)
    assert clock.votes(options, asked=True, keeps_time=False) == Votes(0, 0, 1)
    without = replace(options, exit_signal_handler=False)
    assert clock.votes(without, asked=True, keeps_time=False) == Votes()
    asked = due_after(options, 9, 4, Votes(signals=2))
    assert asked.save and "SIGTERM reached 2 ranks" in asked.stop
    assert due_after(options, 4, 4, Votes(0, 1, 2)) == Due(save=True), "it ends by itself"


@pytest.mark.parametrize(
    "changes",
    [{"save_interval_minutes": 1.0}, {"exit_duration_in_mins": 1.0}, {"exit_signal_handler": True}],
)
def test_ranks_talk_only_where_a_flag_needs_it(changes: dict[str, float]) -> None:
    assert not votes_are_taken(SAVES) and votes_are_taken(replace(SAVES, **changes))


def test_a_run_ends_after_the_step_that_the_exit_interval_divides() -> None:
    options = replace(SAVES, save_interval=2, exit_interval=3)
    ends = [due_after(options, 9, step, Votes()) for step in (1, 2, 3, 6, 9)]
    assert [(due.save, bool(due.stop)) for due in ends] == [
        (False, False), (True, False), (True, True), (True, True), (True, False),
    ]  # fmt: skip
    assert "--exit-interval 3" in ends[2].stop
    unsaved = due_after(replace(options, save=""), 9, 3, Votes())
    assert not unsaved.save and unsaved.stop
