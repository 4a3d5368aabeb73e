"""Passes of policy and reference in the tail of a rollout: a run of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import comparable_rows, rows_of, warm_run, write_inputs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

FLAGS = """
    --train-iters 2 --grpo-prompts-per-step 4 --grpo-group-size 4 --global-batch-size 8
    --max-prompt-length 32 --rollout-max-response-length 24 --rollout-kv-cache-gb 0.05
    --reward-function reward.py:digits --grpo-kl-beta 0.1 --lr 1e-3 --log-rollouts 1
    --log-rollout-tokens --old-logprob recompute
"""
PAUSE = "1:generate:2:pause"  # the engine of rank 1 is last in step 2


def run(folder: Path, choice: str, layout: str, num_ranks: int) -> dict[str, Any]:
    """What a run measured, without what moved, and what it sampled.

    When the turns of a conversation come decides how many steps the engine makes, how much of its
    cache they fill, and how it rounds its log-probs.
    """
    passes = ("--reference-pass", choice, "--old-logprob-pass", choice)
    flags = [*f"{FLAGS} {layout}".split(), *passes]
    fault = PAUSE if choice == "tail" else ""
    warm_run(folder, flags, output=choice, num_ranks=num_ranks, fault=fault)
    rows = comparable_rows(folder / choice)
    engines = ("rollout/steps", "rollout/kv_cache", "mismatch/") if "environment" in layout else ()
    timed = ("exchange/", *engines)
    steps = [{n: v for n, v in row.items() if not n.startswith(timed)} for row in rows]
    lines = (folder / choice / "rollouts.jsonl").read_text().splitlines()
    return {"steps": steps, "rollouts": [json.loads(line) for line in lines]}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "other"),
    [
        ("", 2, "packed"),
        ("--tensor-model-parallel-size 2 --rollout-tp 2", 4, "single"),
        ("--rl-environment calculator", 2, "single"),
    ],
    ids=["beside packed rows", "with tensor ranks", "with conversations"],
)
def test_a_run_with_the_tail_has_the_numbers_of_one_without(
    layout: str, num_ranks: int, other: str, tmp_path: Path
) -> None:
    """To the bit, beside packed rows as well: a CPU rounds a row alike whatever is beside it."""
    write_inputs(tmp_path, 32)
    plain, tail = (run(tmp_path, choice, layout, num_ranks) for choice in (other, "tail"))
    assert tail == plain and tail["steps"][1]["loss/kl"] > 0
    assert tail["steps"][1]["policy/ratio_max_deviation"] > 1e-4, "in the second update"
    for name in ("reference", "old_logprobs"):
        early = [row[f"throughput/{name}_in_tail"] for row in rows_of(tmp_path / "tail")]
        assert early[1] >= 0.5, "all samples of the engine that did not pause, at least"
