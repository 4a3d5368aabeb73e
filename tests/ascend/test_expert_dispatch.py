"""What the plan believes of vLLM-Ascend's dispatch of experts, asked of its own functions."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.graph_sizes import even_graph_sizes, num_default_sizes
from mindspeed_rl.planning.expert_dispatch import ExpertDispatch, dispatched_tokens
from mindspeed_rl.rollout.provider import EngineSizes

pytestmark = pytest.mark.ascend_emul


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    from ascend.emulator import stand_ins
    from ascend.emulator.device import emulate

    emulate()
    stand_ins.install("acl", "triton", *stand_ins.VLLM_NEEDS)
    os.environ.setdefault("VLLM_VERSION", "0.23.0")
    import vllm_ascend.ascend_forward_context as forward
    import vllm_ascend.utils as utils
    from vllm_ascend.platform import NPUPlatform

    return SimpleNamespace(forward=forward, utils=utils, platform=NPUPlatform)


def test_the_group_of_the_dispatch_has_no_size_of_its_own(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So HCCL_BUFFSIZE is the only way; the others have one whatever it is."""
    monkeypatch.setattr(engine.utils, "calculate_dp_buffer_size", lambda: 50)
    sizes = engine.utils.get_hccl_config_for_pg_options
    assert sizes("mc2") is None
    for name, size in {"tp": 200, "ep": 200, "dp": 50}.items():
        assert sizes(name) == {"hccl_buffer_size": size}


@pytest.mark.parametrize(
    ("sequences", "graphs", "prefill", "tp"),
    [
        (64, (), False, 2),
        (96, (), False, 5),
        (96, even_graph_sizes(96, 16), False, 4),
        (96, (8, 200), False, 4),
        (4096, (), False, 2),
        (96, (), True, 4),
        (96, (), True, 1),
    ],
)
def test_it_sends_as_many_tokens_as_planned(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    sequences: int,
    graphs: tuple[int, ...],
    prefill: bool,
    tp: int,
) -> None:
    forward = engine.forward
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(graphs), max_cudagraph_capture_size=max(graphs, default=0)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
    )
    own = SimpleNamespace(enable_prefill_mc2=prefill)
    monkeypatch.setattr(forward, "get_ascend_config", lambda: own)
    monkeypatch.setattr(forward, "_mc2_tokens_capacity", None)
    forward.set_mc2_tokens_capacity(config, sequences, 1)
    options: dict[str, object] = {"additional_config": {"enable_prefill_mc2": prefill}}
    tuning = EngineTuningConfig(rollout_graph_sizes=tuple(map(str, graphs)))
    sizes = EngineSizes(batched_tokens=1024, sequences=sequences, block_tokens=128)
    planned = dispatched_tokens(tuning, options, sizes, tp)
    assert forward.get_mc2_tokens_capacity() == planned * tp


@pytest.mark.parametrize(
    ("ranks", "experts"), [(8, 128), (16, 128), (16, 384), (16, 400), (32, 1024), (128, 256)]
)
def test_an_a2_uses_the_operators_where_the_plan_says_so(
    engine: Any, ranks: int, experts: int
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_num_experts=lambda: experts),
        parallel_config=SimpleNamespace(world_size_across_dp=ranks, pipeline_parallel_size=1),
    )
    method = engine.forward._select_a2_moe_comm_method(64, config, 64)
    planned = ExpertDispatch(2048, experts, 8, ranks, 64).buffer_bytes("a2")
    assert (method.name == "MC2") == (planned > 0)


@pytest.mark.parametrize("sequences", [5, 64, 96, 256, 1000])
def test_sizes_of_its_own_end_at_the_number_of_sequences(engine: Any, sequences: int) -> None:
    """vLLM's list of them, with the limit that vLLM-Ascend sets."""
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
    config: Any = SimpleNamespace(
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=sequences, max_num_batched_tokens=8192),
        model_config=SimpleNamespace(enforce_eager=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=None,
        performance_mode="balanced",
    )
    engine.platform.apply_config_platform_defaults(config)
    VllmConfig._set_cudagraph_sizes(config)
    found = compilation.cudagraph_capture_sizes
    assert len(found) == num_default_sizes(sequences)
    assert max(found) <= min(sequences, 512)
