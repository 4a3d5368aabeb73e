"""Qwen3-MoE: attention of Qwen3, softmax router, routed experts without shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.blocks import DENSE_MLP, EMBEDDING, EXPERTS, GROUPED_ATTENTION, HEAD
from mindspeed_rl.models.config_values import read
from mindspeed_rl.models.hf_config import decoder_fields, dense_layers, grouped_query_attention
from mindspeed_rl.models.layers import LayerSpec, MoE
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec

TABLE = WeightTable(
    family="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    blocks=(EMBEDDING, GROUPED_ATTENTION, DENSE_MLP, EXPERTS, HEAD),
)


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-MoE ``config.json``."""
    fields = decoder_fields(config)
    attention = grouped_query_attention(config, qk_norm=True)
    every = read(config, int, "decoder_sparse_step", default=1) or 1
    dense = read(config, list, "mlp_only_layers", default=[])
    moe = MoE(
        num_experts=read(config, int, "num_experts", "num_local_experts"),
        top_k=read(config, int, "num_experts_per_tok"),
        expert_ffn_size=read(config, int, "moe_intermediate_size"),
        normalize_top_k=read(config, bool, "norm_topk_prob", default=False),
    )
    if moe.top_k == 1 and moe.normalize_top_k:
        raise UsageError(
            "config.json: num_experts_per_tok 1 with norm_topk_prob true is not supported; "
            "allowed: 2 or more experts, or norm_topk_prob false"
        )
    layers = tuple(
        layer if n in dense or (n + 1) % every else LayerSpec(attention, moe)
        for n, layer in enumerate(dense_layers(config, attention))
    )
    return ModelSpec(TABLE.family, layers, **fields)
