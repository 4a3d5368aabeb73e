"""Qwen2 and Qwen2.5 (dense): grouped-query attention with q/k/v bias, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.rules import (
    GateUp,
    GroupedQKV,
    Replicated,
    Split,
    StackedQKV,
    Vocab,
    WeightTable,
)
from mindspeed_rl.models.spec import ModelSpec, eos_ids_of, rope_theta_of

_M, _H = "decoder.layers.{l}.", "model.layers.{l}."
_QKV, _QKV_BIAS = f"{_H}self_attn.{{p}}_proj.weight", f"{_H}self_attn.{{p}}_proj.bias"
_GATE_UP, _DOWN = f"{_H}mlp.{{p}}_proj.weight", f"{_H}mlp.down_proj.weight"
_O_PROJ = f"{_H}self_attn.o_proj.weight"
_NORM_1, _NORM_2 = f"{_H}input_layernorm.weight", f"{_H}post_attention_layernorm.weight"
_EMBED, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

TABLE = WeightTable(
    family="qwen2",
    architectures=("Qwen2ForCausalLM",),
    trainer=(
        Vocab("embedding.word_embeddings.weight", stage="first", hf=_EMBED),
        Replicated(_M + "input_layernorm.weight", hf=_NORM_1),
        GroupedQKV(_M + "self_attention.linear_qkv.weight", hf=_QKV),
        GroupedQKV(_M + "self_attention.linear_qkv.bias", hf=_QKV_BIAS, bias=True),
        Split(
            _M + "self_attention.linear_proj.weight",
            hf=_O_PROJ,
            dims=("hidden_size", "q_size"),
            dim=1,
        ),
        Replicated(_M + "pre_mlp_layernorm.weight", hf=_NORM_2),
        GateUp(_M + "mlp.linear_fc1.weight", hf=_GATE_UP),
        Split(
            _M + "mlp.linear_fc2.weight",
            hf=_DOWN,
            dims=("hidden_size", "ffn_hidden_size"),
            dim=1,
        ),
        Replicated("decoder.final_layernorm.weight", stage="last", hf=_NORM),
        Vocab("output_layer.weight", stage="last", hf=_HEAD, tied_to=_EMBED),
    ),
    engine=(
        Vocab("model.embed_tokens.weight", stage="first", hf=_EMBED),
        Replicated(_NORM_1, hf=_NORM_1),
        StackedQKV(_H + "self_attn.qkv_proj.weight", hf=_QKV),
        StackedQKV(_H + "self_attn.qkv_proj.bias", hf=_QKV_BIAS, bias=True),
        Split(_O_PROJ, hf=_O_PROJ, dims=("hidden_size", "q_size"), dim=1),
        Replicated(_NORM_2, hf=_NORM_2),
        GateUp(_H + "mlp.gate_up_proj.weight", hf=_GATE_UP),
        Split(_DOWN, hf=_DOWN, dims=("hidden_size", "ffn_hidden_size"), dim=1),
        Replicated(_NORM, stage="last", hf=_NORM),
        Vocab("lm_head.weight", stage="last", hf=_HEAD, tied_to=_EMBED),
    ),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen2 ``config.json``; refuses what the trainer does not compute."""
    if config.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window true is not supported; set it to false")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r}; allowed: 'silu'")
    heads = int(config["num_attention_heads"])
    return ModelSpec(
        family="qwen2",
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        ffn_hidden_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocab_size=int(config["vocab_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta_of(config),
        max_position_embeddings=int(config["max_position_embeddings"]),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True,
        eos_token_ids=eos_ids_of(config),
    )
