"""The picture of a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

from mindspeed_rl.metrics.curves import DOTS_PER_INCH, FIGURE_INCHES, Series, draw_run, plot_run

_REPOSITORY = Path(__file__).resolve().parents[3]
_PANELS = (
    "Reward",
    "Held-out accuracy",
    "Response length",
    "Train/rollout mismatch",
    "Throughput",
    "Time per step, by phase",
)


def _records(num_steps: int = 12) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": step / num_steps,
            "eval/accuracy": step / num_steps,
            "eval/accuracy_lenient": (step + 1) / (num_steps + 1),
            "response/length_mean": 100.0 + step,
            "mismatch/max_abs_logprob": 10.0**-step,
            "throughput/tokens_per_s": 1e4,
            "time/generate_s": 3.0,
            "time/update_s": 1.0,
            "time/step_s": 4.1,
        }
        for step in range(1, num_steps + 1)
    ]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _panels(records: list[dict[str, Any]]) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in draw_run(records, "run").axes}


def _texts(axes: Axes) -> str:
    return "\n".join(text.get_text() for text in axes.texts)


def test_all_panels_show_their_metric_with_units() -> None:
    panels = _panels(_records())
    assert tuple(panels) == _PANELS
    for axes in panels.values():
        assert axes.get_xlabel() == "training step"
        assert axes.get_ylabel()
        assert "not logged" not in _texts(axes)
    assert panels["Train/rollout mismatch"].get_yscale() == "log"
    strict, lenient = panels["Held-out accuracy"].get_lines()
    assert strict.get_label() == "strict" and lenient.get_linestyle() == "--"
    assert np.asarray(strict.get_ydata()).tolist() == [
        record["eval/accuracy"] for record in _records()
    ]
    legend = panels["Time per step, by phase"].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["generate", "update", "whole step"]


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Reward", ["reward/mean"]),
        ("Held-out accuracy", ["eval/accuracy", "eval/accuracy_lenient"]),
        ("Response length", ["response/length_mean"]),
        ("Train/rollout mismatch", ["mismatch/max_abs_logprob"]),
        ("Throughput", ["throughput/tokens_per_s"]),
        ("Time per step, by phase", ["time/generate_s", "time/update_s"]),
    ],
)
def test_missing_metric_is_labelled(title: str, names: list[str]) -> None:
    kept = [{k: v for k, v in record.items() if k not in names} for record in _records()]
    assert [t for t, axes in _panels(kept).items() if "not logged" in _texts(axes)] == [title]
    nulls = [record | dict.fromkeys(names) for record in _records()]
    assert "no finite value" in _texts(_panels(nulls)[title])


@pytest.mark.parametrize("num_steps", [0, 1, 2, 12])
def test_every_panel_of_a_run_of_any_length_is_drawn_into(num_steps: int, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(map(_line, _records(num_steps))))
    plot_run(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    pixels = matplotlib.image.imread(tmp_path / "a.png")
    width, height = (round(inches * DOTS_PER_INCH) for inches in FIGURE_INCHES)
    assert pixels.shape[:2] == (height, width)
    for row in np.array_split(pixels[..., :3], 2, axis=0):
        for panel in np.array_split(row, 3, axis=1):
            assert len(np.unique(panel.reshape(-1, 3), axis=0)) > 10


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_lines_of_constant_values_are_inside_their_panels(value: float) -> None:
    """Shares at 0, too, which the axis would cover by half."""
    names = ("response/length_mean", "throughput/tokens_per_s", "eval/accuracy")
    panels = _panels([record | dict.fromkeys(names, value) for record in _records()])
    for title in ("Response length", "Throughput"):
        bottom, top = panels[title].get_ylim()
        assert bottom == 0 and 1.03 * value < top < 1.2 * max(value, 1)
    assert panels["Held-out accuracy"].get_ylim()[0] < 0


def test_equal_engines_are_drawn_on_a_linear_scale(tmp_path: Path) -> None:
    records = [record | {"mismatch/max_abs_logprob": 0.0} for record in _records()]
    assert _panels(records)["Train/rollout mismatch"].get_yscale() == "linear"


def test_small_phases_are_put_together() -> None:
    phases = {f"time/phase_{i}_s": float(i) for i in range(1, 13)}
    records = [{"step": step, **phases} for step in (1, 2)]
    legend = _panels(records)["Time per step, by phase"].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == [*(f"phase_{i}" for i in range(12, 4, -1)), "other phases"]


def test_smoothing_skips_what_is_not_finite() -> None:
    values = [1.0, 3.0, math.nan, 5.0, 9.0]
    series = Series(np.arange(5), np.array(values)).smoothed(2)
    assert series.values.tolist() == [1.0, 2.0, 3.0, 5.0, 7.0]
    nothing = Series(np.arange(1), np.array([math.nan])).smoothed(2)
    assert np.isnan(nothing.values).all()


def test_missing_file_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "a.png")


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(_line(_records(1)[0]))
    # Run without torch: the tool must work where only the files of a run are.
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['plot_run', sys.argv[1]];"
        "runpy.run_path('tools/plot_run.py', run_name='__main__')"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=_REPOSITORY,
        env={
            "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'tools'}",
            "PATH": "",
            "MPLCONFIGDIR": str(tmp_path),
        },
        check=True,
        timeout=60,
    )
    assert (tmp_path / "curves.png").stat().st_size > 1000
