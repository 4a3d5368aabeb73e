"""Qwen2 and Qwen2.5 (dense): grouped-query attention with q/k/v bias, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.blocks import DENSE_MLP, EMBEDDING, GROUPED_ATTENTION, HEAD
from mindspeed_rl.models.hf_config import decoder_fields, dense_layers, grouped_query_attention
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec

TABLE = WeightTable(
    family="qwen2",
    architectures=("Qwen2ForCausalLM",),
    blocks=(EMBEDDING, GROUPED_ATTENTION, DENSE_MLP, HEAD),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen2 ``config.json``."""
    layers = dense_layers(config, grouped_query_attention(config, qkv_bias=True))
    return ModelSpec(TABLE.family, layers, **decoder_fields(config))
