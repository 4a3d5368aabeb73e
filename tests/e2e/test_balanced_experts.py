"""Experts that move between steps change no number of a run, and the run can be resumed.

Real megatron-core and real vLLM on two ranks that share the experts of a Qwen3-MoE. Every weight
update is proven bit by bit within the runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import train_rl, warm_run, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--reward-function reward.py:digits --max-prompt-length 24 --rollout-max-response-length 12 "
    "--grpo-prompts-per-step 4 --grpo-group-size 4 --micro-batch-size 4 --lr 1e-3 "
    "--lr-decay-style constant --expert-model-parallel-size 2 "
    "--rollout-tp 1 --rollout-dp 2 --rollout-ep 2"
)
BALANCED = f"{FLAGS} --rollout-expert-placement balanced"
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a reward."""
    folder = tmp_path_factory.mktemp("placement")
    write_inputs(folder, 24, family="qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def moved(world: Path) -> Rows:
    """Three steps, after the first of which experts move."""
    return train_rl(world, f"{BALANCED} --train-iters 3".split(), output="moved")


def test_moved_experts_change_no_number(world: Path, moved: Rows) -> None:
    linear = train_rl(world, f"{FLAGS} --train-iters 3".split(), output="linear")
    assert moved[0]["experts/moved"] == 1.0
    assert moved[0]["experts/imbalance"] > 1.2 > moved[1]["experts/imbalance"]
    assert moved[0]["reshard/bytes_received"] == 0.0 < moved[1]["reshard/bytes_received"]
    for mine, other in zip(moved, linear, strict=True):
        assert mine["experts/imbalance"] >= mine["experts/imbalance_reachable"] >= 1.0
        for name in ("reward/mean", "response/length_mean", "optimizer/grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4), name
        assert mine["mismatch/max_abs_logprob"] < 1e-3


def test_a_resumed_run_has_the_experts_where_they_were(world: Path, moved: Rows) -> None:
    half = f"{BALANCED} --save save --save-interval 2".split()
    warm_run(world, [*half, "--train-iters", "2"], output="half")
    (rest,) = train_rl(world, [*half, "--load", "save", "--train-iters", "3"], output="rest")
    for name in (
        *("reward/mean", "mismatch/max_abs_logprob", "reshard/bytes_received"),
        *("experts/imbalance", "experts/imbalance_reachable"),
    ):
        assert rest[name] == moved[-1][name], name
