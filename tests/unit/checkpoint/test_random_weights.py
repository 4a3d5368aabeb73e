"""Random weights: the same numbers at the same place of a tensor, whoever holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_rl.checkpoint.random_weights import INIT_STD, draw_weights
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.weight_layouts.base import pieces_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

DENSE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 601,  # rows of three blocks, which no size divides
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def drawn(config: dict[str, Any], seed: int, **sizes: int) -> dict[str, torch.Tensor]:
    """Whole HF tensors, put together from what the ranks hold; all holders agree."""
    spec = spec_from_hf_config(config)
    stages = even_stages(spec.num_layers, sizes.pop("pp", 1))
    layout = MegatronLayout(spec, ParallelLayout.build(stages=stages, **sizes), 8)
    found = {name: torch.full(shape, torch.nan) for name, shape in layout.hf_shapes.items()}
    for rank in range(layout.parallel.world):
        shapes = layout.local_shapes(rank).items()
        params = {name: torch.full(shape, torch.nan) for name, shape in shapes}
        draw_weights(layout, rank, params, seed)
        assert not any(param.isnan().any() for param in params.values())
        for shard in pieces_of(layout, rank):
            piece = shard.piece
            mine = piece.view.of(params[piece.param])[piece.param_box.slices]
            target = found[piece.hf_name][piece.hf_box.slices]
            assert target.isnan().all() or torch.equal(target, mine), piece.hf_name
            target.copy_(mine)
    return found


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (DENSE, {"world": 2, "tp": 2}),
        (DENSE, {"world": 8, "tp": 2, "pp": 2}),
        (EXPERTS, {"world": 4, "tp": 2, "ep": 2, "etp": 1}),
        (EXPERTS, {"world": 2, "tp": 2, "etp": 2}),
    ],
)
def test_every_layout_has_the_same_weights(config: dict[str, Any], sizes: dict[str, int]) -> None:
    alone = drawn(config, 5, world=1)
    for name, tensor in drawn(config, 5, **sizes).items():
        assert torch.equal(tensor, alone[name]), name


def test_matrices_are_normal_norms_one_and_biases_zero() -> None:
    found = drawn(DENSE, 5, world=1)
    embedding = found["model.embed_tokens.weight"]
    assert abs(float(embedding.std()) - INIT_STD) < 0.05 * INIT_STD
    assert abs(float(embedding.mean())) < 0.05 * INIT_STD
    rows = embedding[:512].view(2, 256, 16)
    assert not torch.equal(rows[0], rows[1]), "each block has numbers of its own"
    assert (found["model.norm.weight"] == 1).all()
    assert (found["model.layers.1.self_attn.q_proj.bias"] == 0).all()
    first, second = (found[f"model.layers.{n}.mlp.up_proj.weight"] for n in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, drawn(DENSE, 6, world=1)["model.layers.0.mlp.up_proj.weight"])
