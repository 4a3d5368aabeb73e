"""Rotary frequencies equal transformers' for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.rope import rope_of

_CONTEXT = "original_max_position_embeddings"
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, _CONTEXT: 8192,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, _CONTEXT: 4096},
    "yarn-deepseek": {"rope_type": "yarn", "factor": 40.0, _CONTEXT: 4096,
                      "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 16.0, _CONTEXT: 2048,
                         "truncate": False, "attention_factor": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_are_those_of_transformers(kind: str, head_dim: int, theta: float) -> None:
    parameters = KINDS[kind] | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    rope = rope_of(config.to_dict())
    found = torch.tensor(rope.inverse_frequencies(head_dim))
    assert torch.allclose(found, expected, rtol=2e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "largest", "positions"),
    [("yarn", 131072, 16384), ("yarn", 8192, 8192), ("linear", 131072, 131072)],
)
def test_an_engine_knows_the_positions_of_yarns_stretched_context(
    kind: str, largest: int, positions: int
) -> None:
    """vLLM gives NaN beyond 4 x 4096 (YaRN), without an error."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=largest,
        rope_parameters=KINDS[kind] | {"rope_theta": 1e4},
    )
    assert engine_provider().positions(spec_from_hf_config(config.to_dict())) == positions
