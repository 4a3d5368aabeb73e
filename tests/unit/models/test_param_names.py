"""Parameter names under Transformer Engine's modules, which MindSpeed stands in for.

The expected names are written out after megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py``;
tests/ascend builds the real modules and compares.
"""

from __future__ import annotations

from collections import Counter

import pytest
from support.published import published_config

from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.param_names import GROUPED, LOCAL, TRANSFORMER_ENGINE, ParamNames
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.weights.layouts.megatron import MegatronLayout

MODELS = ("qwen2.5-7b", "qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b")
DENSE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
LATENT = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def layout_of(model: str, modules: ParamNames, *, ep: int = 1) -> MegatronLayout:
    spec = spec_from_hf_config(published_config(model))
    grid = ParallelLayout.build(
        world=8, stages=even_stages(spec.num_layers), tp=2, ep=ep, etp=1 if ep > 1 else 2
    )
    return MegatronLayout(spec, grid, 128, modules)


def renamed(model: str, layer: int, modules: ParamNames, *, ep: int = 1) -> dict[str, str]:
    """Names of a layer that change, without the prefix of the layer, by the tensor they hold."""
    prefix = f"decoder.layers.{layer}."
    pairs: dict[str, str] = {}
    of: list[dict[str, str]] = []
    for kind in (LOCAL, modules):
        layout = layout_of(model, kind, ep=ep)
        of.append({
            name: shard.piece.param
            for name in layout.held_names(0)
            if name.startswith(f"model.layers.{layer}.")
            for shard in layout.shards(name)
            if 0 in shard.owner_ranks
        })  # fmt: skip
    assert of[0].keys() == of[1].keys()
    for name, before in of[0].items():
        if before != of[1][name]:
            pairs[before.removeprefix(prefix)] = of[1][name].removeprefix(prefix)
    return pairs


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
    found = renamed("qwen3-30b-a3b", 0, GROUPED, ep=4)
    experts = {k: v for k, v in found.items() if ".experts." in k}
    assert experts == {
        f"mlp.experts.local_experts.{e}.{fc}.weight": f"mlp.experts.{fc}.weight{e}"
        for e in range(32)
        for fc in ("linear_fc1", "linear_fc2")
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("modules", [TRANSFORMER_ENGINE, GROUPED])
def test_shapes_and_tensors_are_the_same(model: str, modules: ParamNames) -> None:
    local, other = layout_of(model, LOCAL), layout_of(model, modules)
    assert other.hf_shapes == local.hf_shapes
    for rank in (0, 5):
        found, expected = other.local_shapes(rank), local.local_shapes(rank)
        assert len(found) == len(expected)
        assert Counter(found.values()) == Counter(expected.values())
