"""What the start of a run says about the places of experts."""

from __future__ import annotations

import pytest
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.planning.run_plan import plan_rl
from mindspeed_rl.rl.report import placement_lines


def lines_of(placement: str, layouts: str) -> list[str]:
    """The lines of a run of Qwen3-30B-A3B in bfloat16 on 16 ranks."""
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --train-iters 1 --bf16 --sequence-parallel
        --grpo-prompts-per-step 16 --grpo-group-size 4 --rollout-kv-cache-gb 8
        --expert-tensor-parallel-size 1 --rollout-expert-placement {placement} {layouts}
    """
    config = parse(RLRunConfig, words.split(), "test").config
    return placement_lines(config, plan_rl(config, 16, files=False))


STAGES = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 8 --rollout-tp 2 --rollout-dp 8 --rollout-ep 16"
)


@pytest.mark.parametrize("placement", ["trainer", "balanced"])
def test_the_bytes_with_and_without_are_told(placement: str) -> None:
    """48 layers of 8 experts of 9 MiB on a rank: 3.375 GiB.

    With stages of 8 ranks a rank holds its experts in half of the layers, at best. In linear places
    the first and the last rank alone do, which is 1/16 of all experts.
    """
    (line,) = lines_of(placement, STAGES)
    assert "48 of 48 layers" in line
    assert "1.69 GiB" in line and "3.16 with linear" in line


def test_where_nothing_is_gained_that_is_told() -> None:
    same = "--expert-model-parallel-size 16 --rollout-tp 2 --rollout-dp 8 --rollout-ep 16"
    (line,) = lines_of("trainer", same)
    assert "as many" in line and "GiB" not in line
    assert lines_of("linear", same) == []
