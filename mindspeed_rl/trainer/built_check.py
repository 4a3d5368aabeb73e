"""Checks that a built model has the architecture and the weights that its config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from mindspeed_rl.core.boxes import Shape
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.trainer.model_config import architecture_fields

# Name of a field, its value in the built model, its value in the model's config.
_Pair = tuple[str, Any, Any]
# Values that mean the same as None: MindSpeed's adaptor writes them into the configuration.
_NEUTRAL = {"moe_shared_expert_intermediate_size": 0, "moe_router_topk_scaling_factor": 1.0}


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
    fields = architecture_fields(spec)
    pairs = [
        *((name, getattr(model.config, name), value) for name, value in fields.items()),
        ("tie_embeddings", model.share_embeddings_and_output_weights, spec.tie_embeddings),
        ("layers of the chunk", len(model.decoder.layers), num_layers),
        *(pair for layer in model.decoder.layers for pair in _layer_pairs(layer, model, spec)),
        *_norm_pairs(model, spec),
    ]
    wrong = [
        f"{name}: built {built}, model {real}"
        for name, built, real in pairs
        if _meaning(name, built) != _meaning(name, real)
    ]
    if wrong:
        raise RuntimeError("the built model differs from config.json: " + "; ".join(wrong))


def _meaning(name: str, value: Any) -> Any:
    """Return the value of a field, or ``None`` where it means that the feature is not used."""
    return None if name in _NEUTRAL and value == _NEUTRAL[name] else value


def _norm_pairs(model: GPTModel, spec: ModelSpec) -> Iterator[_Pair]:
    """Yield the epsilon of every norm, including norms within a fused projection."""
    for name, module in model.named_modules():
        if (eps := getattr(module, "eps", None)) is not None:
            yield f"{name}.eps", eps, spec.norm_eps


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
