"""Checks that a built model has the architecture and the weights that its config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from mindspeed_rl.models.megatron_fields import attention_fields
from mindspeed_rl.models.spec import ModelSpec

# Name of a field, its value in the built model, its value in the model's config.
_Pair = tuple[str, Any, Any]
Shape = tuple[int, ...]


def check_weights(built: Mapping[str, torch.Tensor], declared: Mapping[str, Shape]) -> None:
    """Compare the parameters of a built model with this rank's rows of the weight table.

    A parameter without a row would stay 0 and would never be transferred.

    Raises:
        RuntimeError: Some parameters exist on one side only or have different shapes.
    """
    shapes = {name: tuple(param.shape) for name, param in built.items()}
    wrong = [
        f"{name}: built {shapes.get(name)}, table {declared.get(name)}"
        for name in sorted({*shapes, *declared})
        if shapes.get(name) != declared.get(name)
    ]
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} parameters of the built model differ from the weight table: "
            + "; ".join(wrong[:5])
        )


def check_built(model: GPTModel, spec: ModelSpec, num_layers: int) -> None:
    """Compare the configuration and the modules of a built chunk with the spec.

    Args:
        model: A chunk of the built model.
        spec: Architecture that the model should have.
        num_layers: Number of layers that the chunk should have.

    Raises:
        RuntimeError: Some fields differ; the message names all of them.
    """
    pairs = [
        *_dense_pairs(model, spec),
        ("layers of the chunk", len(model.decoder.layers), num_layers),
        *(_expert_pairs(model.config, spec) if spec.moe else ()),
        *(pair for layer in model.decoder.layers for pair in _layer_pairs(layer, model, spec)),
        *_norm_pairs(model, spec),
    ]
    wrong = [f"{name}: built {built}, model {real}" for name, built, real in pairs if built != real]
    if wrong:
        raise RuntimeError("the built model differs from config.json: " + "; ".join(wrong))


def _dense_pairs(model: GPTModel, spec: ModelSpec) -> Iterator[_Pair]:
    config = model.config
    for attention in spec.attentions:
        for name, value in attention_fields(attention).items():
            yield name, getattr(config, name), value
    yield "num_layers", config.num_layers, spec.num_layers
    yield "hidden_size", config.hidden_size, spec.hidden_size
    yield "ffn_hidden_size", config.ffn_hidden_size, spec.ffn_hidden_size
    yield "norm_eps", config.layernorm_epsilon, spec.norm_eps
    yield "normalization", config.normalization, "RMSNorm"
    yield "gated_linear_unit", config.gated_linear_unit, True
    yield "activation", config.activation_func, F.silu
    yield "linear bias", config.add_bias_linear, False
    yield "tie_embeddings", model.share_embeddings_and_output_weights, spec.tie_embeddings
    yield "experts", config.num_moe_experts, spec.num_experts or None
    yield "rotary_interleaved", config.rotary_interleaved, False


def _norm_pairs(model: GPTModel, spec: ModelSpec) -> Iterator[_Pair]:
    """Yield the epsilon of every norm, including norms within a fused projection."""
    for name, module in model.named_modules():
        if (eps := getattr(module, "eps", None)) is not None:
            yield f"{name}.eps", eps, spec.norm_eps


def _expert_pairs(config: Any, spec: ModelSpec) -> Iterator[_Pair]:
    moe = spec.moe
    assert moe is not None
    grouped = moe.num_groups > 1
    yield "num_experts_per_tok", config.moe_router_topk, moe.top_k
    yield "moe_intermediate_size", config.moe_ffn_hidden_size, moe.expert_ffn_size
    shared = config.moe_shared_expert_intermediate_size or 0
    yield "shared experts", shared, moe.shared_ffn_size
    expert_layers = tuple(n for n, has in enumerate(config.moe_layer_freq) if has)
    yield "expert layers", expert_layers, spec.expert_layers
    yield "scoring_func", config.moe_router_score_function, moe.score_function
    yield "router bias", config.moe_router_enable_expert_bias, moe.router_bias
    yield "n_group", config.moe_router_num_groups, moe.num_groups if grouped else None
    yield "topk_group", config.moe_router_group_topk, moe.top_k_groups if grouped else None
    scaling = config.moe_router_topk_scaling_factor or 1.0
    yield "routed_scaling_factor", scaling, moe.scaling_factor
    if moe.score_function == "softmax":
        yield "norm_topk_prob", not config.moe_router_pre_softmax, moe.normalize_top_k
    yield "auxiliary loss", config.moe_router_load_balancing_type, "none"
    yield "expert capacity (drops tokens)", config.moe_expert_capacity_factor, None


def _layer_pairs(layer: Any, model: GPTModel, spec: ModelSpec) -> Iterator[_Pair]:
    name = f"layer {layer.layer_number}"
    attention = layer.self_attention
    own = spec.layer(layer.layer_number - 1)
    yield f"{name} experts", hasattr(layer.mlp, "router"), own.moe is not None
    scale = own.attention.softmax_scale(spec.rope)
    yield f"{name} softmax scale", attention.core_attention.softmax_scale, scale
    rotary = attention.rotary_pos_emb if own.latent_attention else model.rotary_pos_emb
    expected = torch.tensor(spec.rope.inverse_frequencies(own.attention.rope_dim))
    yield f"{name} rope", torch.equal(rotary.inv_freq.cpu(), expected), True
