"""Layouts of experts with which megatron-core would compute wrong gradients are refused."""

from __future__ import annotations

import pytest
from support.published import published_config

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import ModelConfig, RLRunConfig
from mindspeed_rl.config.layouts import training_layout
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.models.registry import spec_from_hf_config

TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"


def layout(flags: str, model: str = "qwen3-30b-a3b") -> ParallelLayout:
    given = "--hf-checkpoint x --prompt-data y --rollout-max-response-length 8 --train-iters 1"
    config = parse(RLRunConfig, f"{given} {flags}".split(), "test").config
    spec = spec_from_hf_config(published_config(model))
    return training_layout(ModelConfig(), config.parallel, spec, world=8)


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_cut_otherwise_than_the_rest_need_ranks_of_their_own(etp: int) -> None:
    flags = f"{TP4} --expert-tensor-parallel-size {etp}"
    with pytest.raises(UsageError, match=rf"size {etp} with .*size 1: .*parallel-size 4, or"):
        layout(flags)
    assert layout(f"{flags} --expert-model-parallel-size 2").etp == etp
    assert layout(f"{TP4} --expert-tensor-parallel-size 4").etp == 4
    assert layout(f"{TP4} --expert-tensor-parallel-size 1 --moe-tp-extend-ep").ep == 4


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    with pytest.raises(UsageError, match="needs --sequence-parallel"):
        layout("--tensor-model-parallel-size 4")
    assert layout("--tensor-model-parallel-size 4", "qwen2.5-7b").tp == 4
