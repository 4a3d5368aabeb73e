"""Readers of the parts of a Hugging Face ``config.json`` that the families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.config_values import read
from mindspeed_rl.models.layers import Attention, DenseMLP, GroupedQueryAttention, LayerSpec
from mindspeed_rl.models.rope import rope_of
from mindspeed_rl.models.spec import eos_ids_of


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelSpec`` except its layers, which every decoder family spells alike.

    Raises:
        KeyError: The config lacks a key.
        UsageError: The model has a feature that is not computed.
    """
    if read(config, bool, "use_sliding_window", default=False):
        raise UsageError("config.json: use_sliding_window true is not supported; set it to false")
    if read(config, str, "hidden_act", default="silu") != "silu":
        raise UsageError(f"config.json: hidden_act {config['hidden_act']!r}; allowed: 'silu'")
    for key in ("mlp_bias", "attention_bias"):
        if read(config, bool, key, default=False):
            raise UsageError(f"config.json: {key} true is not supported; allowed: false")
    if config.get("quantization_config"):
        raise UsageError(
            "config.json: quantization_config: the weights are quantised; convert the checkpoint "
            "to bfloat16 first: python tools/convert_checkpoint.py --load-model-type hf "
            "--save-model-type hf --load-dir DIR --save-dir NEW"
        )
    return {
        "hidden_size": read(config, int, "hidden_size"),
        "intermediate_size": read(config, int, "intermediate_size"),
        "vocab_size": read(config, int, "vocab_size"),
        "norm_eps": read(config, float, "rms_norm_eps", default=1e-6),
        "rope": rope_of(config),
        "max_position_embeddings": read(config, int, "max_position_embeddings"),
        "tie_embeddings": read(config, bool, "tie_word_embeddings", default=False),
        "eos_token_ids": eos_ids_of(config),
    }


def grouped_query_attention(
    config: Mapping[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False
) -> GroupedQueryAttention:
    """The attention of a config whose layers agree in it.

    Raises:
        KeyError: The config lacks a key.
    """
    heads = read(config, int, "num_attention_heads")
    even = read(config, int, "hidden_size") // max(1, heads)
    return GroupedQueryAttention(
        num_heads=heads,
        num_kv_heads=read(config, int, "num_key_value_heads", default=heads),
        head_dim=read(config, int, "head_dim", default=even),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def dense_layers(config: Mapping[str, Any], attention: Attention) -> tuple[LayerSpec, ...]:
    """Make equal layers with one attention and a dense MLP.

    Raises:
        KeyError: The config lacks a key.
    """
    layer = LayerSpec(attention, DenseMLP(read(config, int, "intermediate_size")))
    return (layer,) * read(config, int, "num_hidden_layers")
