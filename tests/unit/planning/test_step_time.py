"""The seconds of a step against hand-computed numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.published import PUBLISHED, published_config

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.dry_run import MACHINES
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.packing.micro_batches import PackingEstimate
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import is_first_old_pass_free
from mindspeed_rl.planning.step_time import (
    SPEEDS,
    PhaseSeconds,
    step_seconds,
)
from mindspeed_rl.planning.suggestions import plan_of

# Round numbers: 1 TFLOP/s of which updates reach a half and passes a quarter.
SPEED = replace(
    SPEEDS["a3"],
    bf16_tflops=1.0,
    memory_gb_s=100.0,
    memory_efficiency=0.5,
    update_efficiency=0.5,
    pass_efficiency=0.25,
    decode_layer_us=1000.0,
    eager_factor=3.0,
)
LENGTHS = [100, 200, 300, 400]


def seconds(*flags: str, speed: Any = SPEED, machine: str = "a3") -> dict[str, PhaseSeconds]:
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --bf16
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --max-prompt-length 200 --rollout-max-response-length 400
        --grpo-prompts-per-step 1 --grpo-group-size 4 --rollout-tp 4 --rollout-kv-cache-gb 1
    """
    config = parse(RLRunConfig, [*words.split(), *flags], "test").config
    prediction = MemoryPrediction(config, plan_of(config, 4), MACHINES[machine])
    packing = PackingEstimate(
        samples=4,
        mean_length=250.0,
        num_micro_batches=4,
        longest_row=500,
        tokens_of_rank=500,
        real_share=0.8,
    )
    step = step_seconds(prediction, packing, LENGTHS, speed)
    assert step is not None
    return {phase.phase: phase for phase in (*step.phases, step.whole)}


def operations() -> float:
    """Qwen2.5-7B: 28 layers of 28 heads of 128 channels; padding costs no attention."""
    config = published_config("qwen2.5-7b")
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    assert (hidden, config["num_attention_heads"], config["num_key_value_heads"]) == (3584, 28, 4)
    biases_and_norms = 28 * (3584 + 2 * 512 + 2 * 3584) + 3584
    matrices = 28 * (2 * hidden * hidden + 2 * hidden * 512 + 3 * hidden * ffn) + vocab * hidden
    linear = 2 * (matrices + biases_and_norms) * 1000 / 0.8
    attention = 28 * 28 * (128 + 128) * 2 * sum(n * n / 2 for n in LENGTHS)
    return linear + attention


def test_passes_and_updates_by_hand() -> None:
    """One pass for the reference, three times as much for the update, a bubble of a quarter."""
    found = seconds("--grpo-kl-beta", "0.1")
    per_rank = operations() * (1 + 1 / 4) / 4 / 1e12
    assert found["reference"].seconds == pytest.approx(per_rank / 0.25)
    assert found["update"].seconds == pytest.approx(3 * per_rank / 0.5)
    assert "old log-probs" not in found, "the update computes them"
    assert found["update"].low < found["update"].seconds < found["update"].high
    parts = (found["rollout"], found["reference"], found["update"])
    assert found["sum"].seconds == pytest.approx(sum(p.seconds for p in parts))
    assert found["sum"].high == pytest.approx(sum(p.high for p in parts))


def test_recomputation_and_iterations_by_hand() -> None:
    full = "--recompute-granularity full --recompute-method"
    forward = operations() * (1 + 1 / 4) / 4 / 1e12
    for flags, again in ((f"{full} uniform --recompute-num-layers 2", 1.0),
                         (f"{full} block --recompute-num-layers 7", 0.5)):  # fmt: skip
        found = seconds(*flags.split())
        assert found["update"].seconds == pytest.approx((3 + again) * forward / 0.5)
    selective = seconds("--recompute-granularity", "selective")["update"].seconds
    attention = 28 * 28 * 256 * 2 * sum(n * n / 2 for n in LENGTHS) * 1.25 / 4 / 1e12
    assert selective == pytest.approx((3 * forward + attention) / 0.5)
    mlp = seconds("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    matrices = 2 * 28 * 3 * 3584 * 18944 * 1000 / 0.8 * 1.25 / 4 / 1e12
    assert mlp["update"].seconds == pytest.approx((3 * forward + matrices) / 0.5)
    twice = seconds("--grpo-iterations", "2")
    assert twice["update"].seconds == pytest.approx(2 * 3 * forward / 0.5)
    assert twice["old log-probs"].seconds == pytest.approx(forward / 0.25)


def test_decoding_ends_with_the_longest_response() -> None:
    """Four sequences, of which 100, 200, 300 and 400 tokens are sampled: 399 steps."""
    spec = spec_from_hf_config(published_config("qwen2.5-7b"))
    graphs, eager = seconds(), seconds("--rollout-graph-mode", "eager")
    # engines of four ranks: all weights and one key/value head on a rank, at 50 GB/s
    prediction_bytes = 2 * 28 * 2 * 128
    running = 99 * 4 + 100 * 3 + 100 * 2 + 100 * 1
    cache = running * 125 * prediction_bytes / 50e9
    layers = 399 * spec.num_layers * 1000e-6
    weights = graphs["rollout"].seconds - cache - layers
    assert 399 * 3.7e9 / 50e9 < weights < 399 * 3.9e9 / 50e9, "7.6e9 weights over four ranks"
    assert eager["rollout"].seconds - graphs["rollout"].seconds == pytest.approx(2 * layers)


def test_a_machine_without_fitted_constants_has_no_seconds() -> None:
    words = f"--hf-checkpoint {PUBLISHED['qwen2.5-7b']} --train-iters 1 --rollout-kv-cache-gb 1"
    config = parse(RLRunConfig, words.split(), "test").config
    prediction = MemoryPrediction(config, plan_of(config, 4), MACHINES["h200"])
    packing = PackingEstimate(4, 250.0, 4, 500, 500, 0.8)
    assert step_seconds(prediction, packing, LENGTHS) is None


@pytest.mark.parametrize(
    ("flags", "iterations", "free"),
    [
        ("", 1, True),
        ("", 2, False),
        ("--old-logprob recompute", 1, False),
        ("--grpo-kl-beta 0.1 --rl-kl-in-reward", 1, False),
        ("--rl-policy-loss clip_cov", 1, False),
    ],
)
def test_the_first_old_log_probs_are_free_on_policy(
    flags: str, iterations: int, free: bool
) -> None:
    config = parse(RLRunConfig, flags.split(), "test").config
    assert is_first_old_pass_free(config, iterations) is free
