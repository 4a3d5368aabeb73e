"""Fields of megatron-core's configuration that say what attention a model has.

Training arguments in checkpoints have the same names. One configuration holds for all layers.
"""

from __future__ import annotations

from typing import Any

from mindspeed_rl.models.layers import Attention, LatentAttention


def attention_fields(attention: Attention) -> dict[str, Any]:
    """The fields of an attention. A new kind of attention adds its own here."""
    fields: dict[str, Any] = {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "multi_latent_attention": False,
    }
    if isinstance(attention, LatentAttention):
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": attention.q_lora_rank or None,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.nope_head_dim,
            "qk_pos_emb_head_dim": attention.rope_head_dim,
            "v_head_dim": attention.v_head_dim,
        }
    return fields
