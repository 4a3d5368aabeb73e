"""Arguments of a training run, which readers of Megatron checkpoints look up in the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.convert.checkpoint_files import CheckpointLayout
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.megatron_fields import attention_fields
from mindspeed_rl.models.spec import ModelSpec


def run_arguments(layout: CheckpointLayout, noop_layers: Sequence[int]) -> dict[str, Any]:
    """Make the arguments of a run that would have written a checkpoint of this layout.

    Sources: ``check_checkpoint_args`` of Megatron-LM, ``convert_mg2hf.py`` of MindSpeed-LLM.
    """
    spec, parallel, names = layout.spec, layout.parallel, layout.modules
    stages = parallel.stages
    slots = spec.num_layers + len(noop_layers)
    even = (not layout.slots and stages.is_even) or bool(noop_layers)
    return _architecture(spec) | {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": layout.num_file_ep,
        "expert_tensor_parallel_size": parallel.tp if layout.extends_ep else parallel.etp,
        "context_parallel_size": 1,
        "num_layers": slots,
        "noop_layers": ",".join(map(str, noop_layers)) or None,
        "num_layer_list": None if even else ",".join(map(str, stages.layers_per_chunk)),
        "num_layers_per_virtual_pipeline_stage": (
            slots // (parallel.pp * stages.vpp) if stages.vpp > 1 else None
        ),
        "moe_tp_extend_ep": layout.extends_ep,
        "moe_grouped_gemm": names.experts != "single",
        "transformer_impl": "transformer_engine" if names.dense_norm else "local",
        "mla_mm_split": names.split_up,
        "mtp_num_layers": spec.num_mtp_layers if names.mtp else 0,
        "make_vocab_size_divisible_by": layout.vocab_divisor,
        "padded_vocab_size": round_up(spec.vocab_size, layout.vocab_multiple),
    }


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.attention
    fields: dict[str, Any] = {
        **attention_fields(attention),
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_key_value_heads": attention.num_kv_heads,
        "group_query_attention": attention.num_kv_heads != attention.num_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_epsilon": spec.norm_eps,
        "rotary_base": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "untie_embeddings_and_output_weights": not spec.tie_embeddings,
        "add_bias_linear": False,
        "add_position_embedding": True,
        "normalization": "RMSNorm",
        "swiglu": True,
    }
    if spec.moe is not None:
        shared = spec.moe.shared_ffn_size // spec.moe.expert_ffn_size
        fields |= {
            "num_experts": spec.moe.num_experts,
            "moe_router_topk": spec.moe.top_k,
            "moe_intermediate_size": spec.moe.expert_ffn_size,
            "moe_ffn_hidden_size": spec.moe.expert_ffn_size,
            "first_k_dense_replace": spec.expert_layers[0],
        }
        if shared:
            fields["n_shared_experts"] = shared
    return fields
