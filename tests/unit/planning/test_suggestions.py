"""What a dry run proposes to a run that does not fit."""

from __future__ import annotations

import re

from support.planned_run import RECOMPUTE, WORLD, expert_config
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.memory import MemoryPhase
from mindspeed_rl.planning.findings import Findings, find_out
from mindspeed_rl.planning.report import lines

ONE_RANK = f"""
    --hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --train-iters 1 --bf16 --grpo-prompts-per-step 1
    --grpo-group-size 8 --max-prompt-length 512 --rollout-max-response-length 512
    --rl-dry-run-machine h200 --rollout-kv-cache-gb 4
"""


def test_one_of_a_kind_is_not_told_as_several() -> None:
    text = "\n".join(lines(find_out(parse(RLRunConfig, ONE_RANK.split(), "test").config, 1)))
    assert "\nrank 0:\n" in text and "layout: 1 rank = " in text
    assert "1 replica of" in text and "rollouts: 1 engine, " in text
    assert not re.search(r"\b1 (ranks|engines|replicas|prompts|samples)\b", text)


def config_on(memory_gb: int, *flags: str) -> RLRunConfig:
    machine = ("--rl-dry-run-machine", "h200", "--device-memory-gb", str(memory_gb))
    return expert_config(*RECOMPUTE, *machine, "--rollout-kv-cache-gb", "30", *flags)


def rollout_bytes(found: Findings) -> int:
    prediction = found.prediction
    return prediction.peaks(prediction.representatives())[MemoryPhase.ROLLOUT]


def test_a_cache_that_does_not_fit_is_proposed_as_large_as_fits() -> None:
    """Also where the peak, of another phase, stays: 30.4 GiB in training."""
    found = find_out(config_on(24), WORLD)
    (cache,) = found.suggestions
    flag, size = cache.flags.split()
    assert flag == "--rollout-kv-cache-gb" and cache.mended == (MemoryPhase.ROLLOUT,)
    assert rollout_bytes(found) > found.budget_bytes
    assert rollout_bytes(find_out(config_on(24, flag, size), WORLD)) <= found.budget_bytes
    larger = find_out(config_on(24, flag, str(float(size) + 0.25)), WORLD)
    assert rollout_bytes(larger) > found.budget_bytes
    assert any("still too much, but rollout fits" in line for line in lines(found))


def test_two_changes_that_fit_together_are_proposed_as_one() -> None:
    found = find_out(config_on(32), WORLD)
    *single, both = found.suggestions
    assert all(s.number == 1 and s.peak.num_bytes > found.budget_bytes for s in single)
    assert both.number == 2 and both.flags == "--logprob-chunk-tokens 256 " + single[0].flags
    again = find_out(config_on(32, *both.flags.split()), WORLD)
    assert again.fits and again.peak == both.peak
    assert "2 changes together:" in list(lines(found))
