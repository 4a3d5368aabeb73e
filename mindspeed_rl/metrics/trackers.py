"""Trackers such as Weights & Biases as further places of metrics (``config/diagnostics.py``).

Neither forgets a logged step, so a resumed run is a new run there, in the same group: no step is
found twice in any of them. Their packages are imported when the first metric is logged.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl.config.diagnostics import TrackerConfig


class _Tracker(Protocol):
    """What both packages offer."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of one step."""

    def finish(self) -> None:
        """Write out what is pending."""


class TrackerBackend:
    """A place of metrics behind an ``init`` function; a ``MetricBackend`` of ``RunLogger``.

    Args:
        package: module with ``init``, ``log`` and ``finish``.
        arguments: of ``init``; ``name`` and ``group`` are added.
        name: of the run, and of the group of its resumptions.
    """

    def __init__(self, package: str, arguments: Mapping[str, Any], name: str) -> None:
        self._package, self._arguments, self._name = package, dict(arguments), name
        self._run: _Tracker | None = None
        self._start = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; the first call begins the run."""
        if self._run is None:
            name = f"{self._name} from step {self._start}" if self._start else self._name
            module = importlib.import_module(self._package)
            self._run = module.init(name=name, group=self._name, **self._arguments)
        assert self._run is not None
        # Charts of both cannot show what is no number.
        self._run.log({n: float(v) for n, v in values.items() if math.isfinite(v)}, step=step)

    def truncate_after(self, step: int) -> None:
        """What comes is another run, which begins with ``step``."""
        self.close()
        self._start = step

    def restore(self, step: int, values: Mapping[str, float]) -> None:
        """The new run begins with the last step that is kept."""
        self.log(step, values)

    def close(self) -> None:
        """Write out what is pending."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def make_trackers(
    config: TrackerConfig, output_dir: str | Path, flags: Mapping[str, Any]
) -> list[TrackerBackend]:
    """The trackers that were asked for; for the writer rank.

    Args:
        config: the trackers.
        output_dir: of the run; names it and takes local files unless the configuration says more.
        flags: configuration of the run, shown beside its charts.
    """
    folder = Path(output_dir).resolve().name
    return [
        TrackerBackend(
            tracker.package, {**tracker.arguments, "config": dict(flags)}, tracker.name or folder
        )
        for tracker in config.trackers(str(output_dir))
    ]
