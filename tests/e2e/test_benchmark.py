"""Throughput runs of two ranks without weights and data, and their figures against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import rows_of, warm_run, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT, RESPONSE, PROMPTS, GROUP = 70, 90, 2, 4
FLAGS = (
    f"--rl-benchmark-lengths {PROMPT} {RESPONSE} --train-iters 2 "
    f"--grpo-prompts-per-step {PROMPTS} --grpo-group-size {GROUP} --device-peak-tflops 0.5 "
    "--vllm-block-size 32 --eval-prompt-data gone.jsonl --reward-function reward.py:digits"
)
# Ten blocks of 32 tokens: four responses of an engine do not fit beside each other.
LITTLE_CACHE = "--tensor-model-parallel-size 2 --rollout-kv-cache-gb 0.000305"
EXPERTS = "--expert-model-parallel-size 2 --rollout-tp 2 --rollout-ep 2 --rollout-kv-cache-gb 0.01"


def benchmark(folder: Path, family: str, flags: str) -> tuple[list[dict[str, Any]], str]:
    """Metrics of the steps, and what was printed."""
    write_inputs(folder, 1, family=family)
    (folder / "model" / "model.safetensors").unlink()
    (folder / "train.jsonl").unlink()
    told = warm_run(folder, [*FLAGS.split(), *flags.split()])
    assert not (folder / "out" / "hf").exists()
    return rows_of(folder / "out"), told


def check_rates(row: dict[str, Any]) -> None:
    """Rate x seconds = tokens, of every part."""
    response, total = PROMPTS * GROUP * RESPONSE, PROMPTS * GROUP * (PROMPT + RESPONSE)
    seconds = {
        "": row["time/step_s"],
        "rollout_": row["time/generate_s"] + row["time/reward_s"] + row["time/wait_s"],
        "update_": row["time/update_s"],
    }
    for part, time_s in seconds.items():
        for kind, tokens in (("", response), ("all_", total)):
            rate = row[f"throughput/{part}{kind}tokens_per_s"]
            assert rate * time_s == pytest.approx(tokens), (part, kind)
            assert row[f"throughput/{part}{kind}tokens_per_s_per_device"] == rate / 2
    assert seconds["rollout_"] + seconds["update_"] < seconds[""]
    tflops = row["throughput/update_tflops_per_device"]
    assert row["throughput/update_mfu"] == pytest.approx(tflops / 0.5)


def test_lengths_rates_and_the_use_of_a_cache_that_is_too_small(tmp_path: Path) -> None:
    rows, output = benchmark(tmp_path, "qwen2", LITTLE_CACHE)
    assert len(rows) == 2 and "throughput, mean of steps 2 to 2" in output
    for row in rows:
        check_rates(row)
        assert row["response/length_min"] == row["response/length_max"] == RESPONSE
        assert row["reward/max"] > row["reward/min"] and row["optimizer/grad_norm"] > 0
        assert row["rollout/preemptions"] > 0 and 0.8 < row["rollout/kv_cache_use_max"] <= 1
        assert 0 < row["rollout/prefix_cache_hit_rate"] <= 0.75 * 64 / PROMPT
        assert row["mismatch/max_abs_logprob"] < 1e-4, "the engine has the same random weights"


def test_experts_are_evenly_used(tmp_path: Path) -> None:
    """Each pass and the engine choose others, so log-probs differ and end no run."""
    rows, _ = benchmark(tmp_path, "qwen3_moe", EXPERTS)
    for row in rows:
        check_rates(row)
        assert row["rollout/preemptions"] == 0
        assert row["rollout/prefix_cache_hit_rate"] == pytest.approx(0.75 * 64 / PROMPT)
        assert 1e-3 < row["mismatch/mean_abs_logprob"] < 1
