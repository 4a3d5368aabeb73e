"""Operations of a training pass, written out for published sizes."""

from __future__ import annotations

import pytest

from mindspeed_rl.models.flops import training_flops
from mindspeed_rl.models.registry import spec_from_hf_config

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def test_six_operations_per_weight_and_token_and_causal_attention() -> None:
    """Qwen2.5-0.5B has 494,032,768 weights, its embedding is the head as well."""
    spec = spec_from_hf_config(QWEN)
    lengths = [100, 37]
    weights = 6 * 494_032_768 * sum(lengths)
    pairs = sum(n * n / 2 for n in lengths)
    attention = 24 * 3 * pairs * 2 * (2 * 14 * 64)
    assert training_flops(spec, lengths) == pytest.approx(weights + attention, rel=1e-12)


def test_of_experts_only_the_chosen_ones_count() -> None:
    """Qwen3-30B-A3B: matrices of attention, router and 8 of 128 experts, and the head."""
    config = QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768
    matrices = 48 * layer + 151936 * 2048
    found = training_flops(spec_from_hf_config(config), [1])
    assert found == pytest.approx(6 * matrices, rel=2e-4), "norms and one pair are the rest"
