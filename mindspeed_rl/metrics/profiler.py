"""Traces a window of steps with the profiler of the platform."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.profiler import record_function

from mindspeed_rl.config.diagnostics import PROFILE_FOLDER, ProfilerConfig
from mindspeed_rl.platforms.base import Platform, Profiler


class StepProfiler:
    """Starts and stops the profiler of this rank at the borders of steps.

    Args:
        config: Configuration of the window, the ranks and the folder.
        platform: Platform that provides the profiler.
        rank: Global rank.
        output_dir: Folder of the run; traces go to a folder in it unless the configuration has one.
    """

    def __init__(
        self, config: ProfilerConfig, platform: Platform, rank: int, output_dir: str | Path
    ) -> None:
        self._config, self._platform, self._rank = config, platform, rank
        self._folder = Path(config.profile_save_path or Path(output_dir) / PROFILE_FOLDER)
        self._running: Profiler | None = None
        self._first = 0
        self._next = 0

    def begin_step(self, step: int) -> None:
        """Start the profiler where the window begins and stop it where the window ends. Local.

        A run that resumes inside the window profiles the rest of it.
        """
        inside = self._config.profile_step_start <= step < self._config.profile_step_end
        self._next = step
        if inside and self._running is None and self._config.asks_for(self._rank):
            self._first = step
            worker = f"rank{self._rank}"
            self._running = self._platform.profiler(self._config, self._folder, worker)
            self._running.start()
        elif not inside and self._running is not None:
            self._stop(last=step - 1)

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return a context that marks the range ``phase NAME`` in a running trace. Local."""
        if self._running is None:
            return nullcontext()
        return record_function(f"phase {name}")

    def close(self) -> None:
        """Write the trace of a window that lasts until the end of the run."""
        if self._running is not None:
            self._stop(last=self._next)

    def _stop(self, last: int) -> None:
        running, self._running = self._running, None
        assert running is not None
        self._platform.synchronize()
        os.makedirs(self._folder, exist_ok=True)
        running.stop(f"steps{self._first}-{last}")
