"""Builds the megatron-core configuration of a ModelSpec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mindspeed_rl.config import KernelConfig, ModelConfig, ParallelConfig, TrainConfig
from mindspeed_rl.config.kernels import DISPATCHERS
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import StageLayout
from mindspeed_rl.models.layers import MoE
from mindspeed_rl.models.megatron_fields import attention_fields
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.platforms.features import TransformerFeatures
from mindspeed_rl.weight_layouts.megatron import MegatronLayout


def build_transformer_config(
    layout: MegatronLayout,
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    kernels: KernelConfig,
    features: TransformerFeatures,
) -> TransformerConfig:
    """Build the configuration of a model in a layout, for a device with the given features."""
    spec, modules = layout.spec, layout.modules
    fields = architecture_fields(spec) | _common(model, train.bf16)
    fields |= _parallel(layout.parallel, parallel.shards_sequence)
    gathers = kernels.moe_token_dispatcher_type == "allgather" and spec.moe is not None
    equal_lengths = train.equal_micro_batch_lengths or gathers
    # Only messages between stages depend on it.
    fields["variable_seq_lengths"] = layout.parallel.pp > 1 and not equal_lengths
    fields |= _recompute(train) | _kernels(layout, kernels, features)
    if spec.moe:
        fields |= {
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
            # Models with a sigmoid router compute its scores in fp32.
            "moe_router_dtype": "fp32" if spec.moe.score_function == "sigmoid" else None,
            "moe_grouped_gemm": modules.grouped_experts,
        }
    if not fields["multi_latent_attention"]:
        return TransformerConfig(**fields)
    return MLATransformerConfig(**fields, rope_type="yarn")  # only yarn scales cosine and sine


def architecture_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of the spec: what a built model must have as well."""
    return {
        **attention_fields(spec.attention),
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "rotary_interleaved": False,
        **(_experts(spec, spec.moe) if spec.moe else {"num_moe_experts": None}),
    }


def _common(model: ModelConfig, bf16: bool) -> dict[str, Any]:
    """Return the fields of the model flags and the precision; weights come from a checkpoint."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return {
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        "perform_initialization": False,
        # These belong to modules of megatron-core that are replaced here: attention and norms.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "calculate_per_token_loss": True,
    }


def _parallel(layout: ParallelLayout, sequence_parallel: bool) -> dict[str, Any]:
    """Return the fields of the layout; an interleaved schedule sends its messages one by one.

    With two stages, batched messages between the same two ranks cross: silently wrong losses.
    """
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": sequence_parallel,
    }
    stages = layout.stages
    if stages.vpp > 1:
        fields |= {
            "virtual_pipeline_model_parallel_size": stages.vpp,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": True,
        }
    if stages.vpp > 1 or not stages.is_even:
        fields["pipeline_model_parallel_layout"] = _layer_layout(stages)
    return fields


def _kernels(
    layout: MegatronLayout, kernels: KernelConfig, features: TransformerFeatures
) -> dict[str, Any]:
    """Return the fields of fusions and memory: what the flags ask for and the device supports."""
    asked = {
        "bias_activation_fusion": kernels.bias_swiglu_fusion,
        "bias_dropout_fusion": kernels.bias_dropout_fusion,
        # Latent attention takes cosine and sine from megatron-core's own module.
        "apply_rope_fusion": kernels.rope_fusion and not layout.spec.latent_attention,
        "gradient_accumulation_fusion": kernels.gradient_accumulation_fusion,
        "moe_permute_fusion": kernels.moe_permute_fusion and layout.spec.moe is not None,
    }
    available = set(features.fusions)
    if layout.modules.fused_norms:  # MindSpeed's modules fuse it into one kernel
        available.add("bias_activation_fusion")
    dispatcher = kernels.moe_token_dispatcher_type
    if not features.chooses_dispatcher or dispatcher not in DISPATCHERS:
        dispatcher = "alltoall"
    shared = layout.spec.moe is not None and layout.spec.moe.shared_ffn_size > 0
    overlaps = kernels.moe_shared_expert_overlap and features.overlaps_shared_experts
    return {
        **{name: wanted and name in available for name, wanted in asked.items()},
        "use_cpu_initialization": not features.builds_on_device,
        "deallocate_pipeline_outputs": features.frees_sent_outputs,
        # MindSpeed checks it against --moe-permute-fusion in every model, even without experts.
        "moe_token_dispatcher_type": dispatcher,
        "moe_shared_expert_overlap": shared and overlaps and dispatcher == "alltoall",
    }


def _recompute(train: TrainConfig) -> dict[str, Any]:
    if train.recompute_granularity == "none":
        return {}
    if train.recompute_granularity == "selective":
        modules = list(train.recompute_modules)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": train.recompute_method,
        "recompute_num_layers": train.recompute_num_layers,
    }


def _layer_layout(stages: StageLayout) -> list[list[str]]:
    """Return the modules of each chunk in the order of the model, in megatron-core's notation."""
    rows = [["decoder"] * count for count in stages.layers_per_chunk]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return rows


def _experts(spec: ModelSpec, moe: MoE) -> dict[str, Any]:
    """Return the fields of experts: routing of the checkpoint, no auxiliary loss, none dropped."""
    grouped = moe.num_groups > 1
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_layer_freq": [int(layer.moe is not None) for layer in spec.layers],
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_top_k,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_num_groups": moe.num_groups if grouped else None,
        "moe_router_group_topk": moe.top_k_groups if grouped else None,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1 else None,
        "moe_expert_capacity_factor": None,
    }
