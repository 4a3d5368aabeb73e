"""A real engine computes the same with its experts on other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.placement_world import placement_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_tokens_do_not_depend_on_the_places_of_experts(tmp_path: Path) -> None:
    """Two ranks that share the experts of a Qwen3-MoE; each layer has places of its own."""
    model = str(write_tiny_model(tmp_path / "model", family="qwen3_moe"))
    for run in run_ranks(placement_world, 2, work_dir=tmp_path, args=(model,)):
        assert run.linear.keys() == run.moved.keys() and run.linear
        for i, expected in run.linear.items():
            assert run.moved[i].token_ids == expected.token_ids
            assert run.moved[i].logprobs == pytest.approx(expected.logprobs, abs=2e-5)
        changed = [i for i, c in run.linear.items() if run.unaware[i].token_ids != c.token_ids]
        assert changed, "places matter"
        assert "no update is open" in run.refused
