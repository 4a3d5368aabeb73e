"""Draws the curves of a run on one page, from its ``metrics.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import atomic_path
from mindspeed_rl.metrics import names
from mindspeed_rl.metrics.jsonl import read_jsonl

FIGURE_INCHES = (16.0, 9.0)
DOTS_PER_INCH = 100

Record: TypeAlias = Mapping[str, Any]

_MAX_STEPS_WITH_MARKERS = 40
_MAX_PHASES = 8
_HEAD_ROOM = 1.06  # panels from zero are this much taller than their data
_LEGEND_ROOM = 1.4  # the phases panel is this much taller than its data, for the legend
_OTHER_PHASES = "other phases"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps that logged it.

    Attributes:
        steps: Steps, [points] int64, increasing.
        values: Values, [points] float64; NaN where the logged value was not finite.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, records: Iterable[Record], name: str) -> Series:
        """Select the metric ``name`` of the records; the later of two records of a step counts."""
        points = {record["step"]: record[name] for record in records if name in record}
        steps = sorted(points)
        values = [np.nan if points[step] is None else points[step] for step in steps]
        return cls(np.array(steps, np.int64), np.array(values, np.float64))

    @property
    def is_empty(self) -> bool:
        """Whether there is no finite value to draw."""
        return not np.isfinite(self.values).any()

    def at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values at each of ``steps``; 0 where there is none, or none that is finite."""
        dense = np.zeros(len(steps))
        dense[np.searchsorted(steps, self.steps)] = np.nan_to_num(self.values)
        return dense

    def smoothed(self, window: int) -> Series:
        """Average at each point the finite ones of the last ``window`` values."""
        finite, ones = np.isfinite(self.values), np.ones(window)
        totals = np.convolve(np.where(finite, self.values, 0.0), ones)[: len(finite)]
        counts = np.convolve(finite, ones)[: len(finite)].round()
        with np.errstate(invalid="ignore"):
            return Series(self.steps, totals / counts)


def plot_run(metrics_jsonl: str | os.PathLike[str], out_png: str | os.PathLike[str]) -> None:
    """Draw reward, accuracy, length, mismatch, speed and time per phase into one picture.

    The panel of a metric that was never logged says so.

    Args:
        metrics_jsonl: File that ``RunLogger`` wrote.
        out_png: File of the picture, which is replaced atomically.

    Raises:
        UsageError: The file is missing, or a line of it is not a record.
    """
    metrics_jsonl = Path(metrics_jsonl)
    if not metrics_jsonl.exists():
        raise UsageError(f"{metrics_jsonl} does not exist; give the --output-dir of a run")
    records = list(read_jsonl(metrics_jsonl))
    figure = draw_run(records, title=metrics_jsonl.resolve().parent.name)
    with atomic_path(out_png) as temporary:
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)


def draw_run(records: Sequence[Record], title: str) -> Figure:
    """Draw the six panels of ``records`` into a figure that belongs to no window."""
    figure = Figure(figsize=FIGURE_INCHES, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)  # type: ignore[union-attr, call-arg]
    steps = sorted({record["step"] for record in records})
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps logged"
    figure.suptitle(f"{title}: {span}", fontsize=15)
    for axes, panel in zip(figure.subplots(2, 3).flat, _PANELS, strict=True):
        axes.set_title(panel.title, fontsize=12, fontweight="bold")
        axes.set_ylabel(panel.unit)
        axes.grid(visible=True, alpha=0.25)
        panel.draw(axes, records)
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        if steps:
            margin = 0.02 * (steps[-1] - steps[0]) or 0.5
            axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    return figure


def _draw_reward(axes: Axes, records: Sequence[Record]) -> None:
    reward = Series.of(records, names.REWARD)
    held_out = Series.of(records, names.EVAL_REWARD)
    if _label_if_empty(axes, names.REWARD, reward, held_out):
        return
    _line(axes, held_out, color="C2", label="held out, greedy", linestyle="--")
    window = max(5, len(reward.steps) // 20)
    _line(axes, reward, color="C0", label="each step", alpha=0.4)
    smoothed = reward.smoothed(window)
    axes.plot(smoothed.steps, smoothed.values, color="C0", lw=2.2, label=f"mean of {window} steps")
    axes.legend(frameon=False, loc="best")


def _draw_accuracy(axes: Axes, records: Sequence[Record]) -> None:
    strict = Series.of(records, names.ACCURACY)
    lenient = Series.of(records, names.ACCURACY_LENIENT)
    axes.set_ylim(-0.02, 1.05)  # a line at 0 % is whole
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if _label_if_empty(axes, names.ACCURACY, strict, lenient):
        return
    _line(axes, strict, color="C2", label="strict")
    _line(axes, lenient, color="C1", label="lenient", linestyle="--")  # both are seen where equal
    axes.legend(frameon=False, loc="best")


def _draw_from_zero(axes: Axes, records: Sequence[Record], name: str, color: str) -> None:
    series = Series.of(records, name)
    if not _label_if_empty(axes, name, series):
        _line(axes, series, color=color)
        axes.set_ylim(0, _HEAD_ROOM * float(np.nanmax(series.values)) or 1.0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_mismatch(axes: Axes, records: Sequence[Record]) -> None:
    mismatch = Series.of(records, names.MISMATCH_MAX)
    if _label_if_empty(axes, names.MISMATCH_MAX, mismatch):
        return
    _line(axes, mismatch, color="C4")
    # Bit-equal engines differ by 0, which a logarithmic axis cannot show.
    if (mismatch.values > 0).any():
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.set_ylim(0, 1)


def _draw_phases(axes: Axes, records: Sequence[Record]) -> None:
    phases = _phase_seconds(records)
    if _label_if_empty(axes, "time/<phase>_s", *phases.values()):
        return
    steps = np.array(sorted({step for series in phases.values() for step in series.steps}))
    stacked = _largest_phases({name: series.at(steps) for name, series in phases.items()})
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    if len(steps) == 1:  # an area over one step has no width
        bottom = 0.0
        for color, (name, seconds) in zip(colors, stacked.items(), strict=False):
            axes.bar(steps, seconds, bottom=bottom, width=0.4, label=name, color=color)
            bottom += float(seconds[0])
    else:
        axes.stackplot(steps, list(stacked.values()), labels=list(stacked), colors=colors)
    _line(
        axes, Series.of(records, names.STEP_TIME), color="black", label="whole step", linestyle=":"
    )
    axes.autoscale_view()
    axes.set_ylim(0, _LEGEND_ROOM * axes.dataLim.ymax or 1.0)
    axes.legend(frameon=False, loc="upper left", ncol=3, fontsize=8, columnspacing=1.0)


class Panel(NamedTuple):
    """One of the six panels: its heading, its unit, and the function that draws it."""

    title: str
    unit: str
    draw: Callable[[Axes, Sequence[Record]], None]


_PANELS = (
    Panel("Reward", "mean reward per sample", _draw_reward),
    Panel("Held-out accuracy", "correct answers", _draw_accuracy),
    Panel(
        "Response length",
        "mean tokens per response",
        partial(_draw_from_zero, name=names.RESPONSE_LENGTH, color="C3"),
    ),
    Panel("Train/rollout mismatch", "max |log-prob difference| (nats)", _draw_mismatch),
    Panel(
        "Throughput",
        "tokens per second",
        partial(_draw_from_zero, name=names.TOKENS_PER_S, color="C5"),
    ),
    Panel("Time per step, by phase", "seconds", _draw_phases),
)


def _phase_seconds(records: Sequence[Record]) -> dict[str, Series]:
    """Return the metrics ``time/<phase>_s`` by phase, in the order of first appearance."""
    seen = dict.fromkeys(name for record in records for name in record if name != names.STEP_TIME)
    return {
        name.removeprefix("time/").removesuffix("_s"): Series.of(records, name)
        for name in seen
        if name.startswith("time/") and name.endswith("_s")
    }


def _largest_phases(seconds: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """Return the largest phases, in this order, and the sum of all others."""
    order = sorted(seconds, key=lambda name: -float(seconds[name].sum()))
    result = {name: seconds[name] for name in order[:_MAX_PHASES]}
    if rest := order[_MAX_PHASES:]:
        result[_OTHER_PHASES] = np.sum([seconds[name] for name in rest], axis=0)
    return result


def _line(axes: Axes, series: Series, **options: Any) -> None:
    """Draw a metric; nothing where it has no finite value."""
    if not series.is_empty:
        marker = "o" if len(series.steps) <= _MAX_STEPS_WITH_MARKERS else None
        options = {"marker": marker, "markersize": 3.5, "linewidth": 1.6} | options
        axes.plot(series.steps, series.values, **options)


def _label_if_empty(axes: Axes, metrics: str, *series: Series) -> bool:
    """Write the reason into a panel that has nothing to draw; return whether it is empty."""
    if any(not one.is_empty for one in series):
        return False
    reason = "no finite value" if any(len(one.steps) for one in series) else "not logged"
    text = f"{reason}\n({metrics})"
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="gray")
    axes.set_yticks([])
    return True
