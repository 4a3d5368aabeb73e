"""DeepSeek-V3 and R1: latent attention, dense first layers, sigmoid router with shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.blocks import DENSE_MLP, EMBEDDING, EXPERTS, HEAD, LATENT_ATTENTION
from mindspeed_rl.models.config_values import read
from mindspeed_rl.models.hf_config import decoder_fields, dense_layers
from mindspeed_rl.models.layers import LatentAttention, LayerSpec, MoE
from mindspeed_rl.models.rope import rope_parameters
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec

TABLE = WeightTable(
    family="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    blocks=(EMBEDDING, LATENT_ATTENTION, DENSE_MLP, EXPERTS, HEAD),
    # transformers 5 leaves these keys out; vLLM then routes by softmax and without the bias.
    config_keys=(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
)
# transformers gives the norms of latent attention their default, whatever the config says.
_LATENT_NORM_EPS = 1e-6


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a DeepSeek-V3 ``config.json``; features that are not computed are refused."""
    fields = decoder_fields(config)
    if fields["norm_eps"] != _LATENT_NORM_EPS:
        raise UsageError(f"config.json: rms_norm_eps {fields['norm_eps']}; allowed: 1e-06")
    if not read(config, bool, "rope_interleave", default=True):
        raise UsageError("config.json: rope_interleave false is not supported; allowed: true")
    _check_rope(config, fields["rope"].kind)
    attention = _attention(config)
    layers = dense_layers(config, attention)
    dense = read(config, int, "first_k_dense_replace", default=0)
    with_experts = LayerSpec(attention, _experts(config))
    return ModelSpec(
        TABLE.family,
        (*layers[:dense], *(with_experts for _ in layers[dense:])),
        num_mtp_layers=read(config, int, "num_nextn_predict_layers", default=0),
        **fields,
    )


def _attention(config: Mapping[str, Any]) -> LatentAttention:
    heads = read(config, int, "num_attention_heads")
    if (given := read(config, int, "num_key_value_heads", default=heads)) != heads:
        raise UsageError(
            f"config.json: num_key_value_heads {given} with latent attention; allowed: "
            f"num_attention_heads {heads}, as every head has a key and a value of its own"
        )
    return LatentAttention(
        num_heads=heads,
        q_lora_rank=read(config, int, "q_lora_rank", default=0),
        kv_lora_rank=read(config, int, "kv_lora_rank"),
        nope_head_dim=read(config, int, "qk_nope_head_dim"),
        rope_head_dim=read(config, int, "qk_rope_head_dim"),
        v_head_dim=read(config, int, "v_head_dim"),
    )


def _check_rope(config: Mapping[str, Any], kind: str) -> None:
    """Refuse rope scaling that trainer, transformers and vLLM compute differently."""
    scaling = rope_parameters(config)
    if kind not in ("default", "yarn"):
        raise UsageError(
            f"config.json: rope type {kind!r} with latent attention; allowed: default, yarn"
        )
    if scaling.get("attention_factor") is not None:
        raise UsageError(
            f"config.json: attention_factor {scaling['attention_factor']} with latent attention is "
            "not supported; remove it (mscale and mscale_all_dim say the same)"
        )
    if kind == "yarn" and not read(scaling, bool, "truncate", default=True):
        raise UsageError(
            "config.json: truncate false with latent attention is not supported; allowed: true"
        )
    mscale = read(scaling, float, "mscale", default=1.0) or 1.0
    if mscale != 1.0 and not scaling.get("mscale_all_dim"):
        raise UsageError(
            f"config.json: mscale {mscale} without mscale_all_dim is not supported; "
            "allowed: 1, or both"
        )


def _experts(config: Mapping[str, Any]) -> MoE:
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise UsageError(f"config.json: scoring_func {config['scoring_func']!r}; allowed: sigmoid")
    if config.get("topk_method", "noaux_tc") != "noaux_tc":
        raise UsageError(f"config.json: topk_method {config['topk_method']!r}; allowed: noaux_tc")
    if not read(config, bool, "norm_topk_prob", default=True):
        raise UsageError("config.json: norm_topk_prob false is not supported; allowed: true")
    if read(config, int, "moe_layer_freq", default=1) != 1:
        # DeepSeek's own code and vLLM leave layers without experts, transformers does not.
        raise UsageError(f"config.json: moe_layer_freq {config['moe_layer_freq']}; allowed: 1")
    size = read(config, int, "moe_intermediate_size")
    moe = MoE(
        num_experts=read(config, int, "n_routed_experts", "num_experts", "num_local_experts"),
        top_k=read(config, int, "num_experts_per_tok"),
        expert_ffn_size=size,
        shared_ffn_size=read(config, int, "n_shared_experts", default=0) * size,
        score_function="sigmoid",
        router_bias=True,
        num_groups=read(config, int, "n_group", default=1),
        top_k_groups=read(config, int, "topk_group", default=1),
        scaling_factor=read(config, float, "routed_scaling_factor", default=1.0),
    )
    if moe.top_k == 1:
        # transformers normalises the weight of a single expert to 1, megatron-core does not.
        raise UsageError("config.json: num_experts_per_tok 1 is not supported; allowed: 2 or more")
    if moe.num_groups > 1 and moe.top_k // moe.top_k_groups != 2:
        # transformers and vLLM rank groups by their two best experts, megatron-core by
        # top_k / top_k_groups.
        raise UsageError(
            f"config.json: num_experts_per_tok {moe.top_k} with topk_group {moe.top_k_groups}: "
            "groups are ranked by their best two experts, so allowed: 2 experts per chosen group"
        )
    return moe
