"""Parameter names under Transformer Engine's modules, which MindSpeed stands in for.

The expected names are written out after megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py``;
tests/ascend builds the real modules and compares.
"""

from __future__ import annotations

import pytest
from support.published import published_config

from mindspeed_rl.models.param_names import GROUPED, TRANSFORMER_ENGINE, ParamNames
from mindspeed_rl.models.registry import spec_from_hf_config

DENSE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LATENT = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def renamed(model: str, layer: int, names: ParamNames) -> dict[str, str]:
    """The rows of a layer that have other names than in the table, without the layer's prefix."""
    spec = spec_from_hf_config(published_config(model))
    prefix, pairs = "decoder.layers.{l}.", {}
    for row in names.rows(spec):
        if row.param.startswith(prefix) and layer in row.layers(spec):
            pairs[row.param.removeprefix(prefix)] = names.param(row.param, spec, layer)
    tails = {before: after.removeprefix(prefix) for before, after in pairs.items()}
    assert len(set(tails.values())) == len(tails), "two parameters have one name"
    return {before: after for before, after in tails.items() if before != after}


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b"])
def test_norms_of_dense_layers_are_in_the_linear_layers(model: str) -> None:
    """Query and key norms stay modules of their own."""
    assert renamed(model, 1, TRANSFORMER_ENGINE) == DENSE


def test_the_norm_before_experts_stays_a_module() -> None:
    found = renamed("qwen3-30b-a3b", 0, TRANSFORMER_ENGINE)
    assert found == {"input_layernorm.weight": DENSE["input_layernorm.weight"]}


def test_latent_attention_keeps_the_norm_of_its_input() -> None:
    """A dense layer and one with experts of DeepSeek-V3."""
    assert renamed("deepseek-v3", 0, TRANSFORMER_ENGINE) == LATENT
    with_experts = {k: v for k, v in LATENT.items() if k != "pre_mlp_layernorm.weight"}
    assert renamed("deepseek-v3", 3, TRANSFORMER_ENGINE) == with_experts


def test_grouped_experts_are_numbered_weights_of_one_module() -> None:
    found = renamed("qwen3-30b-a3b", 0, GROUPED)
    assert {k: v for k, v in found.items() if ".experts." in k} == {
        f"mlp.experts.local_experts.{{e}}.{fc}.weight": f"mlp.experts.{fc}.weight{{e}}"
        for fc in ("linear_fc1", "linear_fc2")
    }
