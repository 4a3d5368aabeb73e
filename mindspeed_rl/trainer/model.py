"""Builds a megatron-core GPTModel from a ModelSpec: one chunk of this rank's pipeline stage."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.attention.rotary import PackedRotaryEmbedding
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.layers import LayerSpec
from mindspeed_rl.models.param_names import ParamNames
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.trainer.built_check import check_built
from mindspeed_rl.trainer.latent_attention import DuplicatedLinear
from mindspeed_rl.trainer.norm import RMSNorm
from mindspeed_rl.trainer.packed_attention import PackedSelfAttention
from mindspeed_rl.trainer.patches import (
    expert_splits_on_host,
    uneven_collectives,
    without_transformer_engine,
)
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

# Name of megatron-core's class for a replicated Transformer Engine linear layer. Sharded layers are
# of classes derived from it.
_WHOLE_LINEAR = "TELinear"


class HiddenStateHead(ColumnParallelLinear):
    """An output layer that returns the hidden states; log-probs are computed from them in chunks.

    Its weight is the output projection. GPTModel builds its own output layer, so
    :func:`keep_hidden_states` turns that one into an instance of this class.
    """

    def forward(
        self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states [T, 1, h] unchanged, and no bias."""
        return hidden, None


class ValueHead(torch.nn.Module):
    """The weight [1, h] of a value head, whole on every tensor-parallel rank and initially 0.

    Like :class:`HiddenStateHead` it returns the hidden states unchanged.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        weight = torch.zeros((1, config.hidden_size), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)

    def forward(
        self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states [T, 1, h] unchanged, and no bias."""
        return hidden, None


def keep_hidden_states(model: GPTModel, spec: ModelSpec) -> None:
    """Make the last stage return hidden states instead of logits, and give it the spec's head."""
    if not model.post_process:
        return
    if spec.value_head:
        model.output_layer = ValueHead(model.config)
    else:
        model.output_layer.__class__ = HiddenStateHead


def mark_tensor_parallel_shards(model: GPTModel) -> None:
    """Tell megatron-core which weights are shards of a tensor-parallel group.

    megatron-core sets the mark while it initialises weights, which is switched off here. It takes a
    shard without the mark for a copy and would count only the first rank's shard in the gradient
    norm. Transformer Engine marks every weight, including those of replicated layers, which would
    then count once per rank.
    """
    for module in model.modules():
        dim = _cut_dimension(module)
        for name, weight in module.named_parameters(recurse=False):
            if dim is None and type(module).__name__ == _WHOLE_LINEAR:
                weight.tensor_model_parallel = False
            marked = hasattr(weight, "tensor_model_parallel")
            if dim is not None and name.startswith("weight") and not marked:
                set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _cut_dimension(module: torch.nn.Module) -> int | None:
    """Return the dimension along which the weights of a linear layer or embedding are cut."""
    if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
        return 0
    if isinstance(module, RowParallelLinear):
        return 1
    # The layers of Transformer Engine and of MindSpeed share no class with megatron-core's.
    return {"column": 0, "row": 1}.get(getattr(module, "parallel_mode", None) or "")


def _apply_patches(spec: ModelSpec, modules: ParamNames, features: TransformerFeatures) -> None:
    if (spec.moe or spec.latent_attention) and not modules.fused_norms:
        without_transformer_engine.apply()
    if spec.moe and not features.exchanges_uneven_pieces:
        expert_splits_on_host.apply()
        uneven_collectives.apply()


def layer_spec(layer: LayerSpec, modules: ParamNames) -> ModuleSpec:
    """Return megatron-core's modules of one layer. A new kind of layer has its modules here."""
    common = {
        "num_experts": layer.moe.num_experts if layer.moe else None,
        "moe_grouped_gemm": modules.grouped_experts,
        "qk_layernorm": layer.attention.qk_norm,
        "multi_latent_attention": layer.latent_attention,
    }
    if modules.fused_norms:
        built = get_gpt_layer_with_transformer_engine_spec(**common)
    else:
        built = get_gpt_layer_local_spec(**common, normalization="RMSNorm")
        _set_our_norms(built, layer)
    built.submodules.self_attention.submodules.core_attention = PackedSelfAttention
    return built


def _set_our_norms(built: ModuleSpec, layer: LayerSpec) -> None:
    """Put this project's norms into a spec of megatron-core's own modules."""
    parts = built.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    if layer.latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
    elif layer.attention.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _block_spec(layout: MegatronLayout, stage: int, chunk: int) -> TransformerBlockSubmodules:
    spec, modules = layout.spec, layout.modules
    layers = [spec.layers[n] for n in layout.parallel.stages.layers_of(stage, chunk)]
    kinds = {layer: layer_spec(layer, modules) for layer in layers}
    norm: Any = RMSNorm
    if modules.fused_norms:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(
        layer_specs=[kinds[layer] for layer in layers], layer_norm=norm
    )


def build_model(
    spec: ModelSpec,
    layout: MegatronLayout,
    config: TransformerConfig,
    platform: Platform,
    chunk: int = 0,
) -> GPTModel:
    """Build one chunk of this rank's part of the model, with uninitialised parameters. Local.

    Args:
        spec: Architecture of the model.
        layout: Gives the stage's layers and the padded vocabulary.
        config: Result of :func:`~mindspeed_rl.trainer.model_config.build_transformer_config`.
        platform: Gives the device of the parameters and its features.
        chunk: Index of the chunk in an interleaved pipeline.
    """
    from megatron.core import parallel_state

    device, features = platform.device, platform.transformer_features()
    _apply_patches(spec, layout.modules, features)
    stages = layout.parallel.stages
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        _block_spec(layout, stage, chunk),
        vocab_size=round_up(spec.vocab_size, layout.vocab_multiple),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == stages.pp - 1 and chunk == stages.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(spec.rope.theta),
        vp_stage=chunk if stages.vpp > 1 else None,
    )
    _set_attention(model, spec, device)
    keep_hidden_states(model, spec)
    mark_tensor_parallel_shards(model)
    check_built(model, spec, len(stages.layers_of(stage, chunk)))
    return model.to(device)


def _set_attention(model: GPTModel, spec: ModelSpec, device: torch.device) -> None:
    """Set this project's rotary embedding and the spec's softmax scale in all layers."""
    for shared in {layer.attention for layer in spec.layers if not layer.latent_attention}:
        model.rotary_pos_emb = PackedRotaryEmbedding(spec.rope, shared.rope_dim, device)
    for layer in model.decoder.layers:
        built, own = layer.self_attention, spec.layer(layer.layer_number - 1)
        if own.latent_attention:
            channels = own.attention.rope_dim
            built.rotary_pos_emb = PackedRotaryEmbedding(spec.rope, channels, device, True)
        built.core_attention.softmax_scale = own.attention.softmax_scale(spec.rope)


def mixed_precision(module: Any, config: Any) -> Any:
    """Wrap a chunk so that it computes in the precision of its configuration. Local."""
    if not config.bf16:
        return module
    wrapped = Float16Module(config, module)
    for part in module.modules():
        if getattr(part, "expert_bias", None) is not None:
            part.expert_bias = part.expert_bias.float()  # routing compares sums of small numbers
    return wrapped
