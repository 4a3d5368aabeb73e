"""Real engines of every family, updated in place on four ranks: three syncs equal a fresh load.

Qwen2 is in ``test_silent_errors.py``; any layouts without an engine are in
``tests/simulated/test_planner.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_model import write_tiny_model
from support.family_sync import family_sync_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# In nats, greedy.
TOLERANCE = 1e-4
FLAGS = {
    "llama": "--pipeline-model-parallel-size 2 --rollout-tp 2",
    "qwen3": "--tensor-model-parallel-size 2 --rollout-tp 1",
    "qwen3_moe": "--expert-model-parallel-size 2 --rollout-tp 2 --rollout-dp 2 --rollout-ep 4",
    "deepseek_v3": (
        "--tensor-model-parallel-size 2 --sequence-parallel --moe-tp-extend-ep "
        "--rollout-tp 2 --rollout-dp 2 --rollout-ep 4"
    ),
}
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
# Stages of two ranks, whose experts are spread over four: linear places are not the best.
NEAR_TRAINER = "direct --pipeline-model-parallel-size 2 --rollout-expert-placement trainer"
CASES = [(family, "direct") for family in FLAGS] + [(f, "stream") for f in WITH_EXPERTS]
CASES += [("qwen3_moe", NEAR_TRAINER)]


@pytest.mark.parametrize(("family", "path"), CASES)
def test_three_syncs_equal_a_fresh_load(family: str, path: str, tmp_path: Path) -> None:
    """Packed experts and absorbed projections follow every update, exactly once.

    With experts, the engine's weights leave memory before every update, too.
    """
    model = write_tiny_model(tmp_path / "model", family=family)
    flags = [*FLAGS[family].split(), "--reshard-path", *path.split()]
    if family in WITH_EXPERTS:
        flags += ["--rl-offload", "optimizer", "--rollout-sleep", "all"]
    args = (str(model), flags, str(tmp_path))
    for syncs in run_ranks(family_sync_world, 4, work_dir=tmp_path, args=args):
        assert len(syncs) == 3
        for sync in syncs:
            assert sync.num_params > 10 and sync.differing == []
            assert sync.engine_bytes == sync.predicted_bytes and min(sync.engine_bytes) > 0
            assert sync.facts.trainer <= TOLERANCE and sync.facts.transformers <= TOLERANCE
            assert sync.facts.greedy_gap <= TOLERANCE
            assert sync.facts.change > 100 * TOLERANCE, "the update must matter"
            packed = "packed outside an update" in sync.unreadable
            assert packed if family in WITH_EXPERTS else not sync.unreadable
