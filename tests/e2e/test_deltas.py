"""A run whose weight updates move only what changed is the run whose updates move all weights.

Real megatron-core and real vLLM on two ranks: the trainer cuts the model, each rank has an engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import rows_of, warm_run, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--reward-function reward.py:digits --max-prompt-length 24 --rollout-max-response-length 8 "
    "--grpo-prompts-per-step 4 --grpo-group-size 4 --micro-batch-size 4 --lr 1e-6 --bf16 "
    "--lr-decay-style constant --tensor-model-parallel-size 2 --rollout-tp 1 --train-iters 4 "
    "--rollout-sleep kv --reshard-verify-interval 1"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a reward."""
    return write_inputs(tmp_path_factory.mktemp("deltas"), 24)


def told(world: Path, output: str, *flags: str) -> str:
    """What a run printed; its model is in a folder of its name."""
    return warm_run(world, [*FLAGS.split(), "--export-hf", f"{output}-hf", *flags], output=output)


@pytest.fixture(scope="module")
def whole(world: Path) -> Path:
    """A run that moves all weights."""
    assert "all weights are sent" not in told(world, "whole")
    return world / "whole"


def rollouts_of(output: Path) -> list[dict[str, Any]]:
    """Every response with its log-probs and rewards."""
    return [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("where", ["device", "host"])
def test_changes_alone_leave_every_number_of_a_run(world: Path, whole: Path, where: str) -> None:
    """Every update is proven in full within the run."""
    lines = [line for line in told(world, where, "--reshard-deltas", where).splitlines()
             if "all weights" in line]  # fmt: skip
    assert len(lines) == 1, lines
    assert "all weights are sent, not only what changed: this is the first sync" in lines[0]
    rows = [row for row in rows_of(world / where) if "optimizer/skipped" in row]
    shares = [row["reshard/bytes_of_all"] for row in rows]
    assert len(shares) == 4 and shares[0] == 1.0 and max(shares[1:]) < 0.1
    assert all(row["reshard/changed_share"] > 0 for row in rows[1:]), "the weights change"
    assert rollouts_of(world / where) == rollouts_of(whole)
    weights = "model.safetensors"
    mine, other = (world / f"{name}-hf" / weights for name in (where, "whole"))
    assert mine.read_bytes() == other.read_bytes()
