"""What of megatron-core is in use by device and flag; work-arounds for gloo are on CPU alone."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from support.published import published_config

from mindspeed_rl.attention.kernels import KERNELS
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.launch.job import ignored_flags
from mindspeed_rl.models.param_names import LOCAL, TRANSFORMER_ENGINE, ParamNames
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.cuda import CudaPlatform
from mindspeed_rl.platforms.npu import NpuPlatform
from mindspeed_rl.trainer.model import layer_spec
from mindspeed_rl.trainer.model_config import build_transformer_config
from mindspeed_rl.trainer.packed_attention import PackedSelfAttention
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

FUSIONS = {
    "bias_activation_fusion": "--no-bias-swiglu-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}
PLATFORMS = {"cpu": CpuPlatform, "cuda": CudaPlatform, "npu": NpuPlatform}


def parsed(*flags: str, platform: str = "cuda") -> Any:
    return parse(RLRunConfig, ["--hf-checkpoint", "x", "--platform", platform, *flags], "x")


def built(platform: str, *flags: str, model: str = "qwen2.5-7b", fused: bool = False) -> Any:
    """megatron-core's configuration on a platform whose packages are all installed."""
    spec = spec_from_hf_config(published_config(model))
    grid = ParallelLayout.build(world=1, stages=even_stages(spec.num_layers))
    layout = MegatronLayout(spec, grid)
    if fused:
        layout = replace(layout, modules=TRANSFORMER_ENGINE)
    config = parsed(*flags, platform=platform).config
    features = object.__new__(PLATFORMS[platform]).transformer_features()
    kernels = config.kernels
    return build_transformer_config(
        layout, config.model, config.parallel, config.train, kernels, features
    )


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindspeed_rl.platforms.cuda.find_spec", lambda name: name)
    monkeypatch.setattr("megatron.core.transformer.transformer_config.is_te_min_version",
                        lambda version, **_: True)  # fmt: skip
    rope = "megatron.core.models.common.embeddings.rope_utils"
    for kernel in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(f"{rope}.{kernel}", object())


def fusions(config: Any) -> set[str]:
    return {name for name in FUSIONS if getattr(config, name)}


def test_a_cpu_has_no_fusion_and_frees_nothing_that_gloo_may_still_send() -> None:
    asked = ("--overlap-grad-reduce", "--moe-token-dispatcher-type", "allgather")
    config = built("cpu", *asked)
    assert not fusions(config) and config.use_cpu_initialization
    assert not config.deallocate_pipeline_outputs
    assert config.moe_token_dispatcher_type == "alltoall"
    assert not CpuPlatform().transformer_features().overlaps_reduction


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_work_arounds_for_gloo_are_not_those_of_devices(platform: str) -> None:
    config = built(platform, "--moe-token-dispatcher-type", "allgather")
    assert config.deallocate_pipeline_outputs and not config.use_cpu_initialization
    assert config.moe_token_dispatcher_type == "allgather"
    assert built(platform, "--moe-token-dispatcher-type=flex").moe_token_dispatcher_type == (
        "alltoall"
    )


def test_fusions_are_on_where_there_are_kernels_and_each_flag_turns_one_off() -> None:
    assert fusions(built("cuda")) == set(FUSIONS)
    for name, flag in FUSIONS.items():
        assert fusions(built("cuda", flag)) == set(FUSIONS) - {name}
    assert fusions(built("cuda", model="deepseek-v3")) == set(FUSIONS) - {"apply_rope_fusion"}
    assert fusions(built("npu")) == set()
    assert fusions(built("npu", fused=True)) == {"bias_activation_fusion"}


def test_kernels_of_experts_are_on_where_a_flag_asks_for_them_and_the_device_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moe = "megatron.core.transformer.moe.moe_utils.fused_"
    for kernel in (
        *("permute", "permute_with_probs", "unpermute"),
        *("sort_chunks_by_index", "sort_chunks_by_index_with_probs"),
    ):
        monkeypatch.setattr(moe + kernel, object(), raising=False)
    asked = ("--moe-permute-fusion", "--moe-shared-expert-overlap")

    def on(platform: str, *flags: str, model: str = "deepseek-v3") -> tuple[bool, bool]:
        config = built(platform, *flags, model=model)
        return config.moe_permute_fusion, config.moe_shared_expert_overlap

    assert on("cuda", *asked) == (True, True)
    assert on("cuda") == on("cpu", *asked) == on("npu", *asked) == (False, False)
    assert on("cuda", *asked, "--moe-token-dispatcher-type", "allgather") == (True, False)
    assert on("cuda", *asked, model="qwen3-30b-a3b") == (True, False), "no shared experts"
    assert on("cuda", *asked, model="qwen2.5-7b") == (False, False)


def test_kernels_of_packages_that_are_not_installed_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mindspeed_rl.platforms.cuda.find_spec", importlib.util.find_spec)
    assert fusions(built("cuda")) == {"bias_activation_fusion", "bias_dropout_fusion"}


def test_a_run_says_which_switches_do_nothing() -> None:
    def idle(platform: str, *flags: str) -> tuple[str, ...]:
        return ignored_flags(parsed(*flags), object.__new__(PLATFORMS[platform]))

    flags = (*FUSIONS.values(), "--overlap-grad-reduce", "--moe-token-dispatcher-type", "flex")
    names, reason = idle("cpu", *flags)[0].split(" (")
    assert set(names.split(", ")) == set(flags[:-1]) and reason
    assert idle("cpu") == ()
    shared = "--moe-shared-expert-overlap"
    for platform in ("cpu", "npu"):
        assert [line.split(" (")[0] for line in idle(platform, shared)] == [shared]
    assert idle("cuda", shared) == ()
    assert len(idle("cuda", shared, "--moe-token-dispatcher-type", "allgather")) == 1
    for platform in ("cuda", "npu"):
        assert idle(platform, *flags) == (
            "--moe-token-dispatcher-type flex (computed as alltoall)",
        )


@pytest.mark.parametrize("modules", [LOCAL, TRANSFORMER_ENGINE], ids=["local", "fused"])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "deepseek-v3"])
def test_every_model_attends_within_packed_rows(
    model: str, modules: ParamNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = "mindspeed_rl.trainer.model.get_gpt_layer_with_transformer_engine_spec"
    monkeypatch.setattr(fused, get_gpt_layer_local_spec)  # Transformer Engine is not installed
    layer = spec_from_hf_config(published_config(model)).layer(0)
    built = layer_spec(layer, modules).submodules.self_attention.submodules
    assert built.core_attention is PackedSelfAttention


def test_every_platform_names_its_own_attention_of_packed_rows() -> None:
    named = {
        name: object.__new__(platform).transformer_features().packed_attention
        for name, platform in PLATFORMS.items()
    }
    assert named == {"cpu": "padded_sdpa", "cuda": "varlen", "npu": "tnd"}
    assert set(named.values()) == KERNELS.keys()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_exchange_of_experts_is_patched_on_a_cpu_only(platform: str) -> None:
    features = object.__new__(PLATFORMS[platform]).transformer_features()
    assert features.exchanges_uneven_pieces == (platform != "cpu")
