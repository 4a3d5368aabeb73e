"""The engine's experts in the trainer: real vLLM, real megatron-core, two ranks.

The engine computes in bf16 and the trainer in fp32, so some tokens go to other experts; with the
engine's the two agree better on the probabilities of what was sampled.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.whole_runs import train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = (
    "--reward-function length --max-prompt-length 16 --rollout-max-response-length 24 "
    "--train-iters 2 --grpo-prompts-per-step 4 --grpo-group-size 8 --micro-batch-size 4 --lr 1e-3 "
    "--expert-model-parallel-size 2 --rollout-tp 1 --rollout-dp 2 --rollout-ep 2 "
    "--rollout-dtype bfloat16 --rl-sync-check-tol 1"
)


def test_the_experts_of_the_engine_are_replayed(tmp_path: Path) -> None:
    write_inputs(tmp_path, 64, family="qwen3_moe")
    own = train_rl(tmp_path, FLAGS.split(), output="own")
    theirs = train_rl(tmp_path, [*FLAGS.split(), "--rl-routing-replay", "rollout"], output="theirs")
    assert len(own) == len(theirs) == 2
    assert own[0]["reward/mean"] == theirs[0]["reward/mean"], "the same samples at first"
    for row in theirs:
        assert 0.9 < row["routing/engine_agreement"] < 1.0
    for name, share in (("mean_abs_logprob", 1.0), ("max_abs_logprob", 0.5), ("k3", 0.5)):
        assert theirs[0][f"mismatch/{name}"] < share * own[0][f"mismatch/{name}"], name
