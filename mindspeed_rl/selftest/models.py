"""The tiny models of the self-test, by what is special about them: configurations of HF."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

NUM_LAYERS, NUM_HEADS = 4, 4
VOCAB_SIZE = 307  # no tensor-parallel degree divides it
DENSE, EXPERTS, LATENT = "dense", "experts", "latent attention"

# There are no biases: those of keys have almost no gradient (softmax) beyond rounding errors.
_COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        DENSE: {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        # Fewer heads of keys than of queries, and an expert for every other token.
        EXPERTS: {
            **_COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        # Other channels in queries and keys (24) than in values (16); no experts.
        LATENT: {
            **_COMMON,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": NUM_LAYERS,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    }
)
"""Model type of the self-test -> what its ``config.json`` says."""
