"""Micro-batches that a dry run predicts: drawn lengths, and the rules that flags give."""

from __future__ import annotations

import statistics
from math import log

import pytest
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.packing.micro_batches import drawn_lengths
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.report import as_json, lines
from mindspeed_rl.planning.run_plan import run_packing
from mindspeed_rl.planning.suggestions import plan_of

FLAGS = f"""
    --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --rl-dry-run --rl-world-size 8
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --max-prompt-length 100 --rollout-max-response-length 899 --rollout-tp 4
    --grpo-prompts-per-step 16 --grpo-group-size 16 --rollout-kv-cache-gb 4
"""


def config_of(more: str = "") -> RLRunConfig:
    return parse(RLRunConfig, [*FLAGS.split(), *more.split()], "test").config


def test_drawn_lengths_have_the_mean_and_the_cut_that_is_asked_for() -> None:
    lengths = drawn_lengths(4000, 300, 1000)
    assert statistics.fmean(lengths) == pytest.approx(300, rel=0.01)
    assert max(lengths) == 1000 and lengths.count(1000) > 1
    spread = statistics.pstdev(log(n) for n in lengths if n < 1000)
    assert 0.7 < spread < 0.95, "sigma is 0.9 before the cut"
    assert drawn_lengths(50, 1000, 1000) == [1000] * 50


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("", 1000),  # 999, padded to a multiple of 4 for context parallelism
        ("--micro-batch-size 3", 3000),
        ("--micro-batch-size 3 --max-tokens-per-micro-batch 1500", 1500),
        ("--micro-batch-size 3 --max-tokens-per-micro-batch 0", 0),
    ],
)
def test_tokens_of_a_micro_batch_follow_from_the_flags(more: str, tokens: int) -> None:
    config = config_of(more)
    rules = run_packing(config, plan_of(config, 8))
    assert rules.max_tokens == tokens and not rules.equal_lengths
    assert (rules.fewest, rules.sequence_multiple) == (2, 4)


def test_a_dry_run_packs_as_the_run() -> None:
    found = find_out(config_of("--rl-dry-run-mean-length 250"), 8)
    packing = as_json(found)["packing"]
    assert packing["samples"] == 256 and packing["longest_row"] <= 1000
    assert packing["mean_length"] == pytest.approx(250, rel=0.02)
    assert 0.98 < packing["real_share"] <= 1.0
    assert 60 <= packing["num_micro_batches"] <= 70, "256 x 250 tokens in rows of 1000"
    assert any("tokens per real token, with padding" in line for line in lines(found))
    padded = find_out(
        config_of("--max-tokens-per-micro-batch 0 --equal-micro-batch-lengths"), 8
    ).packing
    assert padded.num_micro_batches == 256 and padded.real_share < 0.4


def test_a_mean_of_responses_comes_with_a_third_of_the_longest_prompt() -> None:
    config = config_of("--rl-dry-run-mean-response-length 150")
    found = find_out(config, 8)
    mean = 150 + config.prompts.max_prompt_length / 3
    assert found.packing.mean_length == pytest.approx(mean, rel=0.02)
    assert not any("gives yours" in line for line in lines(found))
    assert any(
        "third of the longest; --rl-dry-run-mean" in s for s in lines(find_out(config_of(""), 8))
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rl-dry-run-mean-response-length 100000", "responses have at most"),
        ("--rl-dry-run-mean-response-length 9 --rl-dry-run-mean-length 9", "give one of them"),
    ],
)
def test_a_wrong_mean_of_responses_is_refused(flags: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        find_out(config_of(flags), 8)


def test_a_mean_above_the_longest_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--rl-dry-run-mean-length 1000: .* 999 tokens"):
        find_out(config_of("--rl-dry-run-mean-length 1000"), 8)
