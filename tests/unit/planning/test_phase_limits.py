"""Limits of phases against sums by hand."""

from __future__ import annotations

import pytest
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.planning.phase_limits import evaluation_limit, phase_limits
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.planning.suggestions import plan_of

MODEL = f"--hf-checkpoint {PUBLISHED['qwen2.5-7b']} --train-iters 1 --tensor-model-parallel-size 2"
FLAGS = f"""
    {MODEL} --max-prompt-length 500 --rollout-max-response-length 1548 --rollout-tp 4
    --grpo-prompts-per-step 512 --grpo-group-size 16 --rollout-kv-cache-gb 4
"""
# Qwen2.5-7B has 7,615,616,512 parameters, of which the embedding is looked up; 28 layers of 28
# heads of 128 channels compare half of all pairs of tokens.
PER_TOKEN = 2 * (7_615_616_512 - 152_064 * 3_584)
PER_PAIR = 28 * 4 * 28 * 128 / 2
TOKENS = 500 + 1548
SEQUENCE = PER_TOKEN * TOKENS + PER_PAIR * TOKENS**2


def run_of(flags: str) -> tuple[RLRunConfig, RLPlan]:
    config = parse(RLRunConfig, [*FLAGS.split(), *flags.split()], "test").config
    plan = plan_of(config, 8)
    assert isinstance(plan, RLPlan)
    return config, plan


def test_a_phase_has_the_time_that_all_of_its_tokens_take() -> None:
    limits = phase_limits(*run_of(""), "npu")
    generate = 1800 + 8192 * TOKENS * PER_TOKEN / (8 * 5e12)
    assert generate > 7000, "the default of all phases would end a sound rollout"
    assert limits.of("generate") == limits.of("wait") == pytest.approx(generate)
    # Old log-probs, forward, twice as much backward, and once more for recomputation.
    assert limits.of("train") == pytest.approx(1800 + 5 * 8192 * SEQUENCE / (8 * 2.5e13))
    assert limits.of("update") == limits.of("train"), "it is within train, with a clock of its own"
    assert limits.of("reward") == 1800
    # 14 bytes a parameter at 0.5 GB/s.
    files = pytest.approx(1800 + 14 * 7_615_616_512 / 5e8)
    assert limits.of("save") == limits.of("load") == limits.of("export") == files
    assert limits.longest == limits.of("train")
    assert f"generate {generate:.0f}" in limits.line() and "others 1800" in limits.line()


def test_every_pass_over_the_samples_counts() -> None:
    """Of the reference and of a critic, which has updates as well."""
    flags = "--grpo-kl-beta 0.1 --rl-advantage-estimator gae --grpo-iterations 3"
    limits = phase_limits(*run_of(flags), "npu")
    passes = 3 + 2 * 3 * 4
    assert limits.of("train") == pytest.approx(1800 + passes * 8192 * SEQUENCE / (8 * 2.5e13))


def test_one_long_response_has_its_time() -> None:
    """However few samples there are, its tokens come one after the other."""
    flags = "--grpo-prompts-per-step 1 --rollout-max-response-length 20000"
    assert phase_limits(*run_of(flags), "npu").of("generate") == pytest.approx(1800 + 4000)


def test_responses_that_wait_for_a_place_in_the_engine_have_its_time() -> None:
    """Eight engines of one rank have 2 of 40 responses each at once; a turn waits for others."""
    flags = """--grpo-prompts-per-step 20 --grpo-group-size 2 --rollout-tp 1 --vllm-max-num-seqs 2
        --rollout-max-response-length 20000"""
    assert phase_limits(*run_of(flags), "npu").of("generate") == pytest.approx(1800 + 3 * 4000)
    turns = f"{flags} --rl-environment calculator --rl-environment-max-turns 5"
    assert phase_limits(*run_of(turns), "npu").of("generate") == pytest.approx(1800 + 15 * 4000)


def test_agents_have_their_time_limit_as_often_as_they_take_turns() -> None:
    """Eight engines with 40 samples: 5 each, of which 2 agents run at once."""
    flags = """--grpo-prompts-per-step 20 --grpo-group-size 2 --rollout-tp 1
        --rollout-max-response-length 20 --rl-agent a.py:f --rl-agent-workers 2
        --rl-agent-threads 1 --rl-agent-time-limit-s 70000"""
    assert phase_limits(*run_of(flags), "npu").of("generate") == pytest.approx(1800 + 3 * 70000)


def test_after_the_first_steps_a_phase_may_take_ten_times_the_longest() -> None:
    """A hang is not waited for as long as samples of the greatest length would take."""
    limits = phase_limits(*run_of(""), "npu")
    generate = limits.of("generate")
    assert limits.of("generate", 300.0) == 3000 < generate
    assert limits.of("wait", 20.0) == 1800, "never less than the default"
    assert limits.of("generate", generate) == generate, "never more than without"
    assert limits.of("save", 1.0) == limits.of("save"), "files are not samples"


def test_supervised_runs_without_a_length_have_the_time_of_the_longest() -> None:
    given = [*MODEL.split(), "--global-batch-size", "64"]
    config = parse(PretrainRunConfig, given, "test").config
    limits = phase_limits(config, plan_of(config, 8), "npu")
    length = 131_072  # max_position_embeddings
    sequence = PER_TOKEN * length + PER_PAIR * length**2
    assert limits.of("train") == pytest.approx(1800 + 4 * 64 * sequence / (8 * 2.5e13))


def test_engines_that_are_asked_for_more_have_more_time() -> None:
    flags = "--grpo-filter-groups-with-same-reward --rl-resample-factor 1.5 --old-logprob rollout"
    more, plain = (phase_limits(*run_of(f), "npu").of("generate") for f in (flags, ""))
    assert more - 1800 == pytest.approx(1.5 * (plain - 1800))


def test_a_cpu_is_slower() -> None:
    limits = phase_limits(*run_of(""), "cpu")
    assert limits.of("generate") == pytest.approx(1800 + 8192 * TOKENS * PER_TOKEN / (8 * 1e9))


def test_the_flag_is_the_limit_of_every_phase() -> None:
    config, plan = run_of("--phase-timeout-s 600")
    limits = phase_limits(config, plan, "npu")
    assert {limits.of(name) for name in ("generate", "train", "save")} == {600.0}
    assert evaluation_limit(config, plan, "npu", 10**6) == limits.longest == 600.0


def test_an_evaluation_has_the_time_of_its_prompts() -> None:
    config, plan = run_of("--rl-eval-samples 3")
    found = evaluation_limit(config, plan, "npu", 5000)
    assert found == pytest.approx(1800 + 4 * 5000 * TOKENS * PER_TOKEN / (8 * 5e12))


def test_supervised_training_has_the_time_of_its_batch() -> None:
    flags = f"{MODEL} --global-batch-size 512 --seq-length 2048 --sft-data a.jsonl"
    config = parse(PretrainRunConfig, flags.split(), "test").config
    limits = phase_limits(config, plan_of(config, 8), "npu")
    assert limits.of("train") == pytest.approx(1800 + 4 * 512 * SEQUENCE / (8 * 2.5e13))
