"""When a run saves or ends: by steps, by time, before a limit of time, and when it is asked to.

Ranks must agree on the step at which they save. Steps are equal everywhere; what a clock or a
signal says is a vote, and the ranks decide on the sum of their votes (`peers/saving.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_rl.config.training import CheckpointConfig


class Votes(NamedTuple):
    """What speaks for a save after the present step: numbers of ranks, or one rank's 0 and 1.

    Attributes:
        interval: ``--save-interval-minutes`` have passed since the last save.
        limit: Another step would not fit into ``--exit-duration-in-mins``.
        signals: The process was asked to end (``--exit-signal-handler``).
    """

    interval: int = 0
    limit: int = 0
    signals: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """What happens after a step.

    Attributes:
        save: Whether the state is saved.
        stop: Why the run ends here; empty while it goes on.
    """

    save: bool
    stop: str = ""


class SaveClock:
    """Measures steps and saves of this process.

    Args:
        elapsed_s: Seconds since the job was started, earlier attempts included.
        now: Clock in seconds.
    """

    def __init__(self, elapsed_s: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = now() - elapsed_s
        self._saved_s = self._step_began_s = now()
        self._longest_step_s = self._longest_save_s = 0.0

    def begin_steps(self) -> None:
        """Start to measure: what came before belongs to no step."""
        self._saved_s = self._step_began_s = self._now()

    def end_step(self) -> None:
        """Measure the step that ends; what follows it belongs to the next one."""
        now = self._now()
        self._longest_step_s = max(self._longest_step_s, now - self._step_began_s)
        self._step_began_s = now

    def end_save(self) -> None:
        """Measure the save since `end_step`, which is left out of the next step."""
        self._saved_s = self._now()
        self._longest_save_s = max(self._longest_save_s, self._saved_s - self._step_began_s)
        self._step_began_s = self._saved_s

    def votes(self, options: CheckpointConfig, *, asked: bool, keeps_time: bool) -> Votes:
        """Return this process's votes after a step.

        Args:
            options: Flags of checkpoints.
            asked: Whether the process was asked to end.
            keeps_time: Whether the clock of this process counts.
        """
        now, interval_s = self._now(), 60 * options.save_interval_minutes
        limit_s = 60 * options.exit_duration_in_mins
        next_s = self._longest_step_s + self._longest_save_s
        return Votes(
            interval=int(keeps_time and interval_s > 0 and now - self._saved_s >= interval_s),
            limit=int(keeps_time and limit_s > 0 and now - self._began_s + next_s >= limit_s),
            signals=int(options.exit_signal_handler and asked),
        )


def votes_are_taken(options: CheckpointConfig) -> bool:
    """Whether flags ask for a save that does not follow from the number of the step alone."""
    return bool(
        options.save
        and (
            options.save_interval_minutes
            or options.exit_duration_in_mins
            or options.exit_signal_handler
        )
    )


def save_is_due(options: CheckpointConfig, train_iters: int, step: int) -> bool:
    """Whether ``--save`` wants the state after ``step``: every interval, and at the end."""
    if not options.save:
        return False
    at_interval = options.save_interval > 0 and step % options.save_interval == 0
    return at_interval or step == train_iters


def due_after(options: CheckpointConfig, train_iters: int, step: int, votes: Votes) -> Due:
    """Decide by the number of ``step``, and the sum of all ranks' votes, what happens after it.

    The run ends by itself after its last step, so that nothing stops it there.
    """
    stop = ""
    if step < train_iters and votes.signals:
        stop = f"SIGTERM reached {votes.signals} ranks (--exit-signal-handler)"
    elif step < train_iters and votes.limit:
        stop = (
            "another step and a save would not end within --exit-duration-in-mins "
            f"{options.exit_duration_in_mins:g}"
        )
    elif step < train_iters and options.exit_interval and step % options.exit_interval == 0:
        stop = f"--exit-interval {options.exit_interval} divides it"
    besides = bool(options.save) and (votes.interval > 0 or bool(stop))
    return Due(save_is_due(options, train_iters, step) or besides, stop)
