"""The groups that a step uses are those whose buffers are predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.family_models import FAMILY_CASES, write_family_model
from support.group_use import used_groups_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAYOUTS = {
    "tied stages": (
        "qwen2-tied", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    "context": ("qwen2-tied", "--context-parallel-size 2 --use-distributed-optimizer"),
    "hybrid context": (
        "qwen2-tied",
        "--context-parallel-size 4 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 10 "
        "--max-prompt-length 12 --rollout-max-response-length 20",
    ),
    "experts": (
        "qwen3-moe",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    "sharded experts": (
        "deepseek", "--expert-model-parallel-size 2 --use-distributed-optimizer",
    ),
    "cut experts": (
        "qwen3-moe",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_uses_the_predicted_groups(name: str, tmp_path: Path) -> None:
    model, flags = LAYOUTS[name]
    folder = str(write_family_model(FAMILY_CASES[model], tmp_path / "model"))
    layout = (*flags.split(), "--make-vocab-size-divisible-by", "8")
    for used, predicted in run_ranks(
        used_groups_world, 4, work_dir=tmp_path, args=(layout, folder)
    ):
        assert used == predicted
