"""Writes metrics to trackers such as Weights & Biases (``config/diagnostics.py``).

Trackers cannot forget a logged step, so a resumed run is a new run there, in the same group, and
no run has a step twice.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from mindspeed_rl.config.diagnostics import Tracker, TrackerConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.redaction import redacted
from mindspeed_rl.core.user_files import load_from_file


class _Run(Protocol):
    """A run of a tracker, as all tracker packages offer it."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of one step."""

    def finish(self) -> None:
        """Write out pending values."""


class TrackerBackend:
    """A ``MetricBackend`` of ``RunLogger`` for a tracker package.

    Args:
        init: Function of the package that returns a run with ``log`` and ``finish``.
        arguments: Arguments of ``init``, besides ``name`` and ``group``.
        name: Name of the run, and of the group with its resumed runs.
    """

    def __init__(self, init: Callable[..., _Run], arguments: Mapping[str, Any], name: str) -> None:
        self._init, self._arguments, self._name = init, dict(arguments), name
        self._run: _Run | None = None
        self._start = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; the first call starts the tracker's run."""
        if self._run is None:
            name = f"{self._name} from step {self._start}" if self._start else self._name
            self._run = self._init(name=name, group=self._name, **self._arguments)
        # Charts of trackers cannot show values that are not finite.
        self._run.log({n: float(v) for n, v in values.items() if math.isfinite(v)}, step=step)

    def truncate_after(self, step: int) -> None:
        """End the run; the next values belong to another run, which starts with ``step``."""
        self.close()
        self._start = step

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """Log the last step that is kept as the first of the new run."""
        self.log(step, values)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def make_trackers(
    config: TrackerConfig, output_dir: str | Path, flags: Mapping[str, Any]
) -> list[TrackerBackend]:
    """Import the trackers of a configuration, for the writer rank; none starts a run yet.

    Args:
        config: Configuration of the trackers.
        output_dir: Folder of the run, which gives default names and takes local files.
        flags: Configuration of the run, which trackers show with its charts.

    Raises:
        UsageError: A module cannot be imported, or has no function ``init``.
    """
    folder = Path(output_dir).resolve().name
    return [
        TrackerBackend(
            _load_init(tracker),
            {**tracker.arguments, "config": redacted(flags)},
            tracker.name or folder,
        )
        for tracker in config.trackers(str(output_dir))
    ]


def _load_init(tracker: Tracker) -> Callable[..., _Run]:
    if tracker.module.endswith(".py"):
        own = load_from_file(Path(tracker.module), "init", tracker.where)
        return cast(Callable[..., _Run], own)
    try:
        init = getattr(importlib.import_module(tracker.module), "init", None)
    except Exception as error:
        raise UsageError(
            f"{tracker.where}: the module {tracker.module} fails to import: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(init):
        raise UsageError(
            f"{tracker.where}: {tracker.module} has no function init, which starts a run of the "
            "logger (docs/extending.md)"
        )
    return cast(Callable[..., _Run], init)
