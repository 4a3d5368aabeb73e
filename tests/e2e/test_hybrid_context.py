"""A whole run whose short rows are on few context-parallel ranks, against one with static rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.whole_runs import train_rl, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Numbers of the update: they depend on how rows are shared by rounding alone.
COMPARED = ("loss/policy", "policy/entropy", "optimizer/grad_norm", "mismatch/mean_abs_logprob")


def test_a_run_with_rows_on_some_ranks_is_the_run_with_rows_on_all(tmp_path: Path) -> None:
    """Losses of whole sequences (GSPO), so that sums over the ranks of a row matter."""
    write_inputs(tmp_path, 64, family="llama")
    flags = [
        "--reward-function", "reward.py:digits", "--context-parallel-size", "4",
        "--max-prompt-length", "16", "--rollout-max-response-length", "32",
        "--grpo-prompts-per-step", "4", "--grpo-group-size", "4", "--train-iters", "2",
        "--rl-policy-loss", "gspo", "--global-batch-size", "8", "--lr", "1e-3",
    ]  # fmt: skip
    hybrid = ["--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", "12"]
    static = train_rl(tmp_path, flags, output="static", num_ranks=4)
    found = train_rl(tmp_path, [*flags, *hybrid], output="hybrid", num_ranks=4)
    assert len(found) == len(static) == 2
    assert found[0]["packing/real_share"] > static[0]["packing/real_share"], "another plan"
    for one, other in zip(found, static, strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        assert {n: one[n] for n in COMPARED} == pytest.approx(
            {n: other[n] for n in COMPARED}, rel=1e-5, abs=1e-6
        )
