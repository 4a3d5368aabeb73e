"""Measures the time and the peak memory of the phases of a step.

Phases are disjoint: while an inner phase runs the outer one is paused, so that the seconds of all
phases sum to the step less the time outside all phases.

    with timer("rollout"):          # counts a + c
        ...                         # a
        with timer("reward"): ...   # counts b
        ...                         # c
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.metrics.names import STEP_TIME
from mindspeed_rl.platforms.base import Platform


@dataclass(frozen=True, slots=True)
class PhaseUse:
    """Time and memory of one phase in one step.

    Attributes:
        seconds: Wall time, inner phases excluded.
        peak_bytes: Peak memory in use while the phase ran.
    """

    seconds: float
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall time of one step on this rank, by phase in order of first entry."""

    step_s: float
    phases: dict[str, PhaseUse]

    def metrics(self) -> MetricSet:
        """Return the metrics of this rank, ready to be reduced over ranks.

        ``time/<phase>_s`` and ``time/step_s`` are means, so that phases still sum to the step;
        ``time_max/<phase>_s`` is of the slowest rank and ``memory/<phase>_peak_bytes`` of the
        fullest. All ranks must enter the same phases, if only with an empty block.
        """
        result = MetricSet({STEP_TIME: Mean(self.step_s, 1)})
        for name, use in self.phases.items():
            result[f"time/{name}_s"] = Mean(use.seconds, 1)
            result[f"time_max/{name}_s"] = Max(use.seconds)
            result[f"memory/{name}_peak_bytes"] = Max(use.peak_bytes)
        return result


class PhaseTimer:
    """Measures the phases of one step after another; a step begins where the last one ended.

    Args:
        platform: Device that finishes its queued work at every phase border, so that a phase is
            charged for its own work, and that measures the peak memory of the phase.
        clock: Returns monotonic seconds.
        mark: Returns a context that marks the phase for others, such as a profiler.
    """

    def __init__(
        self,
        platform: Platform,
        clock: Callable[[], float] = time.perf_counter,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._platform = platform
        self._clock = clock
        self._mark = mark
        self._stack: list[str] = []
        self._phases: dict[str, PhaseUse] = {}
        self._step_start = self._segment_start = clock()
        self._excluded_s = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the block to ``phase``; entering a phase again adds to it.

        No phase is called ``step``, because ``time/step_s`` is the whole step.
        """
        self._end_segment()
        self._stack.append(phase)
        self._phases.setdefault(phase, PhaseUse(0.0))
        try:
            with self._mark(phase):
                yield
        finally:
            self._end_segment()
            self._stack.pop()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time of the block, such as an evaluation, out of the step.

        Call it outside all phases, and open none within the block.
        """
        assert not self._stack, f"excluded inside the phases {self._stack}"
        self._end_segment()
        start = self._segment_start
        try:
            yield
        finally:
            assert not self._stack, f"phases {self._stack} end after the excluded block"
            self._end_segment()
            self._excluded_s += self._segment_start - start

    def finish_step(self) -> StepTimes:
        """Return the times of the step and begin the next one. Call it outside all phases."""
        assert not self._stack, f"finish_step inside the phases {self._stack}"
        self._end_segment()
        step_s = self._segment_start - self._step_start - self._excluded_s
        times = StepTimes(step_s, self._phases)
        self._phases, self._excluded_s = {}, 0.0
        self._step_start = self._segment_start
        return times

    def _end_segment(self) -> None:
        """Charge the time since the last border to the innermost phase, if there is one."""
        self._platform.wait_for_computation()  # copies to the host may go on
        now = self._clock()
        if self._stack:
            use = self._phases[self._stack[-1]]
            peak = max(use.peak_bytes, self._platform.peak_memory())
            self._phases[self._stack[-1]] = PhaseUse(use.seconds + now - self._segment_start, peak)
        self._platform.reset_peak_memory()
        self._segment_start = now
