"""Specs and sizes of published models from their configs alone, in both spellings.

``pretrain_scripts/models/configs`` holds the numbers of each model's ``config.json`` as it was
published, in the spelling of transformers 4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.published import PUBLISHED, published_config

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.layers import (
    Attention,
    DenseMLP,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    MoE,
)
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.rope import RopeSpec
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.models.tensors import num_parameters

_PLAIN = RopeSpec(1e6)
_LLAMA3 = RopeSpec(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
# 0.1 ln(40) + 1, and the ratio of mscale 1 to mscale_all_dim 1
_YARN = RopeSpec(1e4, "yarn", 40.0, 4096, attention_factor=1.0, softmax_mscale=1.3688879454113936)
_GROUPED = GroupedQueryAttention
_LATENT = LatentAttention(
    128, q_lora_rank=1536, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128
)
_DEEPSEEK_EXPERTS = MoE(
    num_experts=256,
    top_k=8,
    expert_ffn_size=2048,
    shared_ffn_size=2048,
    score_function="sigmoid",
    router_bias=True,
    num_groups=8,
    top_k_groups=4,
    scaling_factor=2.5,
)


def _dense(num_layers: int, attention: Attention, ffn: int) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, DenseMLP(ffn)),) * num_layers


def _experts(num_layers: int, attention: Attention, moe: MoE) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, moe),) * num_layers


# family, layers, hidden and intermediate size, vocabulary, epsilon, rope, positions, tied
SPECS = {
    "qwen2.5-0.5b": ModelSpec(
        "qwen2", _dense(24, _GROUPED(14, 2, 64, qkv_bias=True), 4864), 896, 4864, 151936, 1e-6,
        _PLAIN, 32768, True, eos_token_ids=(151645,),
    ),
    "qwen2.5-7b": ModelSpec(
        "qwen2", _dense(28, _GROUPED(28, 4, 128, qkv_bias=True), 18944), 3584, 18944, 152064, 1e-6,
        _PLAIN, 131072, False, eos_token_ids=(151643,),
    ),
    "qwen2.5-32b": ModelSpec(
        "qwen2", _dense(64, _GROUPED(40, 8, 128, qkv_bias=True), 27648), 5120, 27648, 152064, 1e-5,
        _PLAIN, 131072, False, eos_token_ids=(151643,),
    ),
    "qwen3-8b": ModelSpec(
        "qwen3", _dense(36, _GROUPED(32, 8, 128, qk_norm=True), 12288), 4096, 12288, 151936, 1e-6,
        _PLAIN, 40960, False, eos_token_ids=(151645,),
    ),
    "qwen3-30b-a3b": ModelSpec(
        "qwen3_moe", _experts(48, _GROUPED(32, 4, 128, qk_norm=True), MoE(128, 8, 768)), 2048, 6144,
        151936, 1e-6, _PLAIN, 40960, False, eos_token_ids=(151645,),
    ),
    "qwen3-235b-a22b": ModelSpec(
        "qwen3_moe", _experts(94, _GROUPED(64, 4, 128, qk_norm=True), MoE(128, 8, 1536)), 4096,
        12288, 151936, 1e-6, _PLAIN, 40960, False, eos_token_ids=(151645,),
    ),
    "llama-3.1-8b": ModelSpec(
        "llama", _dense(32, _GROUPED(32, 8, 128), 14336), 4096, 14336, 128256, 1e-5,
        _LLAMA3, 131072, False, eos_token_ids=(128001,),
    ),
    "deepseek-v3": ModelSpec(
        "deepseek_v3", _dense(3, _LATENT, 18432) + _experts(58, _LATENT, _DEEPSEEK_EXPERTS), 7168,
        18432, 129280, 1e-6, _YARN, 163840, False, num_mtp_layers=1, eos_token_ids=(1,),
    ),
}  # fmt: skip


def test_every_published_model_is_tested() -> None:
    assert set(PUBLISHED) == set(SPECS)
    families = {spec.family for spec in SPECS.values()}
    assert families == {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_config_becomes_a_spec(model: str) -> None:
    assert spec_from_hf_config(published_config(model)) == SPECS[model]


@pytest.mark.parametrize("model", PUBLISHED)
def test_transformers_5_saves_a_config_that_means_the_same(model: str, tmp_path: Path) -> None:
    """What ``save_pretrained`` of the installed version makes of the published config."""
    from transformers import AutoConfig

    config = published_config(model)
    AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(tmp_path)
    saved = read_hf_config(tmp_path)
    assert "rope_parameters" in saved and "rope_theta" not in saved, "not the newer spelling"
    assert spec_from_hf_config(saved) == SPECS[model]


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_number_of_parameters_is_that_of_transformers(model: str) -> None:
    """Of modules built without memory: parameters, and the bias of routers, a buffer there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = published_config(model)
    built = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(built)
    biases = [b for name, b in module.named_buffers() if name.endswith("e_score_correction_bias")]
    expected = sum(p.numel() for p in (*module.parameters(), *biases))
    assert num_parameters(spec_from_hf_config(published_config(model))) == expected


def test_tied_embeddings_count_once() -> None:
    plain, tied = (
        spec_from_hf_config(published_config("qwen2.5-7b") | {"tie_word_embeddings": tie})
        for tie in (False, True)
    )
    assert tied.tie_embeddings
    assert num_parameters(plain) - num_parameters(tied) == 152_064 * 3584


# --- refusals ----------------------------------------------------------------------------------

QWEN2, LLAMA = "qwen2.5-7b", "llama-3.1-8b"
DEEPSEEK, MOE = "deepseek-v3", "qwen3-30b-a3b"

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        (QWEN2, {"architectures": ["GPT2LMHeadModel"]}, r"GPT2LM.*known: .*Qwen2ForCausalLM"),
        (QWEN2, {"architectures": None}, "architectures"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN2, {"rope_scaling": {"type": "su", "factor": 4.0}}, "'su'"),
        (QWEN2, {"rope_scaling": {"type": "llama3"}}, "'factor'"),
        (QWEN2, {"rope_theta": None}, "rope_theta"),
        (QWEN2, {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        (QWEN2, {"num_hidden_layers": 0}, "num_layers"),
        (QWEN2, {"head_dim": 33}, "33 rotated"),
        (QWEN2, {"intermediate_size": None}, "'intermediate_size'"),
        # values of wrong types
        (QWEN2, {"hidden_size": "4096"}, "hidden_size '4096'"),
        (QWEN2, {"num_hidden_layers": 2.5}, "num_hidden_layers 2.5"),
        (QWEN2, {"num_attention_heads": True}, "num_attention_heads True"),
        (QWEN2, {"vocab_size": -1}, "vocab_size -1"),
        (QWEN2, {"rms_norm_eps": "1e-6"}, "rms_norm_eps '1e-6'"),
        (QWEN2, {"rope_theta": float("nan")}, "rope_theta nan"),
        (QWEN2, {"tie_word_embeddings": 1}, "tie_word_embeddings 1"),
        (QWEN2, {"hidden_act": 3}, "hidden_act 3"),
        (QWEN2, {"rope_scaling": []}, r"rope_scaling \[\]"),
        (QWEN2, {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, r"factor '4'"),
        # what a family does not compute
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"topk_group": 2}, "topk_group 2"),
        (DEEPSEEK, {"topk_group": 9}, "topk_group 9"),
        (DEEPSEEK, {"n_group": 7}, "n_group"),
        (DEEPSEEK, {"num_experts_per_tok": 300}, "num_experts_per_tok 300"),
        (DEEPSEEK, {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "per_tok 1"),
        (DEEPSEEK, {"n_routed_experts": None}, "'n_routed_experts' of DeepseekV3"),
        (DEEPSEEK, {"num_key_value_heads": 64}, "num_key_value_heads 64"),
        (DEEPSEEK, {"kv_lora_rank": None}, "'kv_lora_rank'"),
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (DEEPSEEK, {"rope_scaling": YARN | {"rope_type": "linear"}}, "'linear'"),
        (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        (DEEPSEEK, {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale 0.7"),
        (DEEPSEEK, {"rope_scaling": YARN | {"truncate": False}}, "truncate"),
        (MOE, {"num_experts": None}, "'num_experts'"),
        (MOE, {"moe_intermediate_size": None}, "'moe_intermediate_size'"),
        (MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        (MOE, {"num_experts_per_tok": 1}, "norm_topk_prob"),
        (MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"vocab_size": 0}, "vocab_size"),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "'factor'"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            LLAMA,  # a null hides no other spelling
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": None}},
            "partial_rotary_factor",
        ),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(model: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        spec_from_hf_config(published_config(model) | change)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False, True, True)),
        ({"decoder_sparse_step": 2}, (False, True) * 3),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, (False, False, True) + (False,) * 3),
    ],
)
def test_which_layers_of_qwen3_moe_have_experts(
    change: dict[str, Any], layers: tuple[bool, ...]
) -> None:
    spec = spec_from_hf_config(published_config(MOE) | {"num_hidden_layers": 6} | change)
    assert tuple(layer.moe is not None for layer in spec.layers) == layers


def test_variants_of_deepseek() -> None:
    """No compressed query, no groups, several shared experts, no scaling."""
    change = {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 3,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
    }
    spec = spec_from_hf_config(published_config(DEEPSEEK) | change)
    assert isinstance(spec.attention, LatentAttention) and spec.moe is not None
    assert (spec.attention.compressed_query, spec.attention.plain_query) == (False, True)
    assert (spec.moe.num_groups, spec.moe.shared_ffn_size) == (1, 3 * 2048)
    assert len(spec.expert_layers) == spec.num_layers and spec.num_mtp_layers == 0
