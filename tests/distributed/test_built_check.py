"""A model that was built otherwise than its config says is refused, whatever differs.

What was built is changed, one thing at a time, in real megatron-core models of two families.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.family_models import FAMILY_CASES, write_family_model
from support.spawn import run_ranks

from mindspeed_rl.trainer.built_check import check_weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_LAYER = "decoder.layers.1."
_ATTENTION = _LAYER + "self_attention."
# path in the model, another value (of a tensor: a factor), the name in the message
CHANGES = {
    "qwen2-tied": (
        ("config.num_attention_heads", 8, "num_attention_heads"),
        ("config.layernorm_epsilon", 1e-2, "layernorm_epsilon"),
        ("config.activation_func", torch.nn.functional.gelu, "activation_func"),
        ("config.multi_latent_attention", True, "multi_latent_attention"),
        ("config.num_moe_experts", 4, "num_moe_experts"),
        ("share_embeddings_and_output_weights", False, "tie_embeddings"),
        (_LAYER + "pre_mlp_layernorm.eps", 1e-2, _LAYER + "pre_mlp_layernorm.eps"),
        ("decoder.final_layernorm.eps", 1e-2, "decoder.final_layernorm.eps"),
        (_ATTENTION + "core_attention.softmax_scale", 0.3, "layer 2 softmax scale"),
        ("rotary_pos_emb.inv_freq", 1.01, "layer 1 rope"),
    ),
    "deepseek": (
        ("config.kv_lora_rank", 8, "kv_lora_rank"),
        ("config.moe_router_topk", 3, "moe_router_topk"),
        ("config.moe_layer_freq", [0, 0, 0, 1], "moe_layer_freq"),
        ("config.moe_router_load_balancing_type", "aux_loss", "moe_router_load_balancing_type"),
        ("config.moe_expert_capacity_factor", 1.0, "moe_expert_capacity_factor"),
        (_ATTENTION + "kv_layernorm.eps", 1e-2, _ATTENTION + "kv_layernorm.eps"),
        (_ATTENTION + "core_attention.softmax_scale", 0.3, "layer 2 softmax scale"),
        (_ATTENTION + "rotary_pos_emb.inv_freq", 1.01, "layer 2 rope"),
    ),
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    from support.built_world import built_world

    root: Path = tmp_path_factory.mktemp("built")
    models = {name: str(write_family_model(FAMILY_CASES[name], root / name)) for name in CHANGES}
    changes = {name: [change[:2] for change in several] for name, several in CHANGES.items()}
    found: dict[str, list[str]] = run_ranks(built_world, 1, work_dir=root, args=(models, changes))[
        0
    ]
    return found


@pytest.mark.parametrize("model", CHANGES)
def test_whatever_was_built_otherwise_is_named(model: str, findings: dict[str, list[str]]) -> None:
    *several, layers = findings[model]
    assert re.search(r"layers.*4.*5", layers)
    for (path, _, name), message in zip(CHANGES[model], several, strict=True):
        assert re.search(rf"(: |; ){re.escape(name)}: ", message), (path, message)


def test_parameters_that_only_one_side_has_are_named() -> None:
    """One without a row of the table would stay 0 and travel nowhere."""
    weight = torch.zeros(2, 3)
    check_weights({"a": weight}, {"a": (2, 3)})
    with pytest.raises(RuntimeError, match=r"\ba: .*\bb: .*\bc: ") as refused:
        check_weights(
            {"a": weight, "b": weight, "d": weight}, {"a": (3, 2), "c": (1,), "d": (2, 3)}
        )
    assert "d: " not in str(refused.value)
