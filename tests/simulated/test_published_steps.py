"""Predicted beside published seconds: the constants in use, and the table of the documentation."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from support.architecture import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from bench.published_steps import FITTED, MACHINE, RUNS, fit, predict, table

from mindspeed_rl.planning.step_time import SPEEDS

SPEED = SPEEDS[MACHINE]


def test_the_constants_in_use_are_the_fitted_ones() -> None:
    """From any start: the fit is exact for the run that it is of."""
    start = replace(SPEED, update_efficiency=0.7, pass_efficiency=0.6, decode_layer_us=90.0)
    fitted = fit(start)
    for name in ("update_efficiency", "pass_efficiency", "decode_layer_us"):
        assert getattr(SPEED, name) == pytest.approx(getattr(fitted, name), rel=0.005), name
    found = predict(FITTED, fitted)
    for phase in ("rollout", "reference", "update"):
        assert found[phase].seconds == pytest.approx(RUNS[FITTED].seconds[phase], rel=1e-6)


def test_the_documentation_has_the_table_as_it_comes_out() -> None:
    """Every published number, with its prediction, and with those that are wrong."""
    page = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    rows = table(SPEED)
    assert len(rows) == 1 + sum(len(run.seconds) for run in RUNS.values())
    for row in rows:
        assert f"| {' | '.join(row)} |" in page
