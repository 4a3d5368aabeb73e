"""What vLLM-Ascend's engine is not built with: models, keys and values that make rollouts wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layout_cases import MOE, spec_of

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.compat.ascend_builds import check_dummy_batches
from mindspeed_rl.config import EngineTuningConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.engines.vllm_ascend.arguments import check_updatable
from mindspeed_rl.engines.vllm_ascend.backend import AscendBackend
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rollout.provider import EngineSettings


@pytest.fixture
def backend(tmp_path: Path) -> AscendBackend:
    (tmp_path / "config.json").write_text("{}")
    layout = VllmLayout(
        spec_of(MOE), EngineLayout(1, 1), transposed_experts=True, expert_module="mlp.experts"
    )
    tuning = EngineTuningConfig(rollout_graph_mode="full-decode")
    settings = EngineSettings(str(tmp_path), layout, 0, "float32", 16, 1, 0, {}, tuning, (8, 64))
    return AscendBackend(settings, CpuPlatform())


@pytest.mark.parametrize("nested", [False, True], ids=["top", "text_config"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("index_topk", 2048), ("index_head_dim", 128), ("compress_ratios", [4, 128, 0])],
)
def test_every_kind_of_sparse_attention_is_refused(key: str, value: object, nested: bool) -> None:
    """Also of the language model inside one that sees."""
    config = {"model_type": "any", key: value}
    whole = {"text_config": config, "vision_config": {}} if nested else config
    with pytest.raises(ValueError, match=key):
        check_updatable(whole, "DIR")


@pytest.mark.parametrize(
    "config",
    [{}, {"index_topk": None}, {"text_config": {"compress_ratios": []}, "index_topk": 2048}],
)
def test_models_with_the_key_and_no_sparse_attention_pass(
    config: dict[str, object],
) -> None:
    """Of a nested configuration the language model's counts alone."""
    check_updatable(config, "DIR")


@pytest.mark.parametrize(
    "key",
    [
        "enable_reduce_sample",
        "enable_shared_expert_dp",
        "dynamic_eplb",
        "enable_balance_scheduling",
        "enable_async_exponential",
        "multistream_overlap_gate",
    ],
)
def test_keys_that_make_rollouts_wrong_are_refused_at_any_depth(
    key: str, backend: AscendBackend
) -> None:
    for additional in ({key: True}, {"eplb_config": {"inner": {key: 1}}}):
        with pytest.raises(ValueError, match=f"--vllm-additional-config {key}: "):
            backend.settings({"additional_config": additional})
    own = backend.settings({"additional_config": {key: False}})["additional_config"]
    assert own[key] is False, "switched off it is what it would be anyway"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"enable_sleep_mode": False}, "--vllm-enable-sleep-mode"),
        ({"additional_config": {"weight_nz_mode": 2}}, "--vllm-additional-config.weight_nz_mode"),
        (
            {"compilation_config": {"cudagraph_capture_sizes": [1]}},
            "--vllm-compilation-config.cudagraph_capture_sizes",
        ),
        ({"additional_config": "{}"}, "--vllm-additional-config"),
    ],
)
def test_values_against_ours_are_refused_with_the_flag(
    options: dict[str, Any], flag: str, backend: AscendBackend
) -> None:
    with pytest.raises(ValueError, match=f"^{flag}: "):
        backend.settings(options)


def test_what_both_say_alike_and_what_is_new_is_merged(backend: AscendBackend) -> None:
    """Dictionaries within dictionaries; ours stay as they were."""
    before = backend.settings({})
    merged = backend.settings(
        {
            "max_num_seqs": 64,
            "enable_sleep_mode": True,
            "additional_config": {"weight_nz_mode": 0, "finegrained_tp_config": {"lmhead": 2}},
        }
    )
    assert merged["max_num_seqs"] == 64 and merged["enable_sleep_mode"] is True
    added = {"finegrained_tp_config": {"lmhead": 2}}
    assert merged["additional_config"] == before["additional_config"] | added
    assert backend.settings({}) == before


@pytest.mark.parametrize(
    ("mode", "version", "refused"),
    [
        ("full-decode", "0.23.0", True),
        ("full-and-piecewise", "0.23.0+a3", True),
        ("full-decode", "0.23.0.post1", False),
        ("piecewise", "0.23.0", False),
        ("eager", "0.23.0", False),
    ],
)
def test_graphs_that_write_dummy_tokens_into_the_cache_are_refused(
    mode: str, version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_rl.compat.ascend_builds.version", lambda name: version)
    if refused:
        with pytest.raises(UsageError, match=f"--rollout-graph-mode {mode}"):
            check_dummy_batches(mode)
    else:
        check_dummy_batches(mode)


def test_graphs_of_several_data_parallel_ranks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_rl.compat.ascend_builds.version", lambda name: "0.23.0")
    flags = "--rollout-graph-mode full-decode --rollout-dp"
    for dp in (1, 2):
        config = parse(RLRunConfig, f"{flags} {dp}".split(), "test").config
        if dp == 1:
            engine_provider().check_run(config, "npu")
            continue
        with pytest.raises(UsageError, match="--rollout-dp"):
            engine_provider().check_run(config, "npu")


@pytest.mark.parametrize(
    ("build", "value", "problem"),
    [
        ("0.23.0.post1", {"enabled": True}, "0.23.0.post1 ignores"),
        ("0.26.0rc1", {"enabled": True}, "0.26.0rc1 ignores"),
        ("0.27.1", {"enabled": True, "enable_batch_invariant": True}, ""),
        ("0.27.1", {"enabled": True, "sleep_mode_extra_cleanup": True}, "sleep"),
    ],
)
def test_rl_config_is_for_builds_that_read_it(
    build: str, value: object, problem: str, backend: AscendBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("mindspeed_rl.compat.ascend_builds.version", lambda name: build)
    given = {"additional_config": {"rl_config": value}}
    if not problem:
        assert backend.settings(given)["additional_config"]["rl_config"] == value
        return
    with pytest.raises(UsageError, match=f"--vllm-additional-config rl_config.*{problem}"):
        backend.settings(given)
