"""Llama 2 and 3 (dense): grouped-query attention without bias, gated MLP, scaled RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.blocks import DENSE_MLP, EMBEDDING, GROUPED_ATTENTION, HEAD
from mindspeed_rl.models.hf_config import decoder_fields, dense_layers, grouped_query_attention
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec

TABLE = WeightTable(
    family="llama",
    architectures=("LlamaForCausalLM",),
    blocks=(EMBEDDING, GROUPED_ATTENTION, DENSE_MLP, HEAD),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Llama ``config.json``."""
    config = {"rope_theta": 1e4, **config}
    layers = dense_layers(config, grouped_query_attention(config))
    return ModelSpec(TABLE.family, layers, **decoder_fields(config))
