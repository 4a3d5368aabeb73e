"""A run of Qwen3-30B-A3B on 32 ranks whose memory tests predict."""

from __future__ import annotations

from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig

WORLD = 32
EXPERT_RUN = tuple(
    f"""
    --hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --train-iters 1 --bf16
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-distributed-optimizer
    --grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-kl-beta 0.001
    --max-prompt-length 512 --rollout-max-response-length 1536
    --rollout-tp 2 --rollout-dp 8 --rollout-ep 16 --rollout-kv-cache-gb 48
    """.split()
)
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1")  # fmt: skip


def expert_config(*flags: str) -> RLRunConfig:
    """The run with further flags."""
    return parse(RLRunConfig, [*EXPERT_RUN, *flags], "test").config
