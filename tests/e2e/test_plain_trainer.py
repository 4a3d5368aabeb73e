"""Updates of a GRPO run equal those of a plain trainer that replays its rollouts.

Real megatron-core and real vLLM on two ranks, pipeline-parallel, against transformers and torch.
PPO, with a critic and unequal settings: ``test_unequal_settings.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.plain_trainer import Recipe, dumped_steps, means_of_pairs, replay, worst_error
from support.whole_runs import train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STEPS, PROMPTS, GROUP = 10, 4, 4
RECIPE = Recipe(
    group_size=GROUP,
    samples_per_update=8,
    lr=1e-3,
    warmup=4,
    clip_grad=0.5,
    eps_lower=0.1,
    eps_upper=0.2,
    kl_beta=0.05,
    entropy_weight=0.01,
    weight_decay=0.1,
)


def test_a_plain_trainer_gets_the_same_weights(tmp_path: Path) -> None:
    """Measured: 1.0e-6 of the norm of a weight, 1.4e-5 of that of its change."""
    write_inputs(tmp_path, 64, family="llama")
    flags = [
        "--reward-function", "reward.py:digits", "--pipeline-model-parallel-size", "2",
        "--max-prompt-length", "16", "--rollout-max-response-length", "7",
        "--export-hf", "out/hf", "--train-iters", str(NUM_STEPS),
        "--grpo-prompts-per-step", str(PROMPTS), "--grpo-group-size", str(GROUP),
        "--micro-batch-size", "3", "--log-rollouts", str(PROMPTS * GROUP), "--log-rollout-tokens",
        *RECIPE.flags(),
    ]  # fmt: skip
    trained = train_rl(tmp_path, flags)
    steps = dumped_steps(tmp_path / "out" / "rollouts.jsonl")
    assert [len(rows) for rows in steps] == [PROMPTS * GROUP] * NUM_STEPS
    found = replay(tmp_path / "model", steps, RECIPE)
    assert len(found.norms) == 20 and min(found.norms) < RECIPE.clip_grad < max(found.norms)
    norms = means_of_pairs(found.norms)
    assert [r["optimizer/grad_norm"] for r in trained] == pytest.approx(norms, rel=1e-4)
    assert max(r["policy/clip_fraction"] for r in trained) > 0.01, "the bounds must act"
    assert worst_error(tmp_path, "hf", found.weights, of_change=False) <= 2e-5
    assert worst_error(tmp_path, "hf", found.weights, of_change=True) <= 2e-4
