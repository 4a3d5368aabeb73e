"""A megatron-core GPTModel from a ModelSpec, and the proof that it is what was asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.config import ModelConfig, TrainConfig
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.parallel.layout import ParallelLayout
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.trainer.norm import RMSNorm
from mindspeed_rl.trainer.packed_attention import PackedRotaryEmbedding, PackedSelfAttention


class HiddenStateHead(ColumnParallelLinear):
    """An output layer that hands the hidden states on; log-probs are computed from them in chunks.

    Its weight is the output projection. GPTModel builds its own output layer, so an instance of
    this class is made by :func:`keep_hidden_states`.
    """

    def forward(
        self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, h] -> the same."""
        return hidden, None


def keep_hidden_states(model: GPTModel) -> None:
    """Make the last stage return hidden states instead of logits; parameters stay as they are."""
    if model.post_process:
        model.output_layer.__class__ = HiddenStateHead


def mark_tensor_parallel_shards(model: GPTModel) -> None:
    """Tell megatron-core which weights are shards of a tensor-parallel group.

    It sets the mark while it initialises weights, which is switched off here; a shard without it
    counts as a copy, and the gradient norm would be that of the first rank's shards alone.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            dim = 1
        elif isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            dim = 0
        else:
            continue
        if module.weight is not None:  # a tied head on the first stage has none of its own
            set_tensor_model_parallel_attributes(module.weight, True, dim, 1)


def build_transformer_config(
    spec: ModelSpec, layout: ParallelLayout, model: ModelConfig, bf16: bool, sequence_parallel: bool
) -> TransformerConfig:
    """The megatron-core configuration of a spec.

    Deallocating pipeline outputs frees a buffer while gloo may still send it (silently wrong
    losses), so it is off. Fusions that need CUDA extensions are off.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
    )


def build_model(
    spec: ModelSpec,
    layout: MegatronLayout,
    config: TransformerConfig,
    train: TrainConfig,
    device: torch.device,
    stage: tuple[bool, bool],
) -> GPTModel:
    """This rank's part of the model, parameters not initialised. Local.

    Args:
        spec: the architecture.
        layout: gives the padded vocabulary.
        config: from :func:`build_transformer_config`.
        train: gives nothing but the sequence limit of position tables.
        device: where parameters live.
        stage: whether this rank is on the (first, last) pipeline stage.
    """
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = PackedSelfAttention
    block = TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )
    multiple = layout.vocab_multiple
    model = GPTModel(
        config,
        block,
        vocab_size=-(-spec.vocab_size // multiple) * multiple,
        max_sequence_length=spec.max_position_embeddings,
        pre_process=stage[0],
        post_process=stage[1],
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(spec.rope_theta),
    )
    model.rotary_pos_emb = PackedRotaryEmbedding(spec.head_dim, spec.rope_theta, device)
    mark_tensor_parallel_shards(model)
    keep_hidden_states(model)
    check_built(model, spec)
    return model.to(device)


def check_built(model: GPTModel, spec: ModelSpec) -> None:
    """Compare the BUILT configuration and modules with the spec (R51).

    Raises:
        ValueError: every field that differs.
    """
    config = model.config
    rotary = model.rotary_pos_emb
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    expected_freq = 1.0 / spec.rope_theta**exponent
    pairs = {
        "num_layers": (config.num_layers, spec.num_layers),
        "hidden_size": (config.hidden_size, spec.hidden_size),
        "ffn_hidden_size": (config.ffn_hidden_size, spec.ffn_hidden_size),
        "num_heads": (config.num_attention_heads, spec.num_heads),
        "num_kv_heads": (config.num_query_groups, spec.num_kv_heads),
        "head_dim": (config.kv_channels, spec.head_dim),
        "norm_eps": (config.layernorm_epsilon, spec.norm_eps),
        "normalization": (config.normalization, "RMSNorm"),
        "gated_linear_unit": (config.gated_linear_unit, True),
        "activation": (config.activation_func, F.silu),
        "qkv_bias": (config.add_qkv_bias or config.add_bias_linear, spec.qkv_bias),
        "linear bias": (config.add_bias_linear, False),
        "tie_embeddings": (model.share_embeddings_and_output_weights, spec.tie_embeddings),
        "rope_theta": (torch.allclose(rotary.inv_freq.cpu(), expected_freq), True),
        "softmax scale": (config.softmax_scale, None),
        "multi_latent_attention": (config.multi_latent_attention, False),
        "experts": (config.num_moe_experts, None),
    }
    for layer in model.decoder.layers:
        pairs[f"layer {layer.layer_number} norm eps"] = (layer.input_layernorm.eps, spec.norm_eps)
    wrong = [f"{name}: built {a}, model {b}" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise RuntimeError("the built model differs from config.json: " + "; ".join(wrong))
