"""Classic Megatron checkpoints as targets: one file per tensor-, pipeline- and expert rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.convert.classic_source import TRACKER, model_chunks, params_of
from mindspeed_rl.convert.target import OutputFile, Target, params_of_rank
from mindspeed_rl.convert.torch_files import read_torch_file, save_unfilled
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.checkpoint_files import MODEL_FILE, CheckpointLayout
from mindspeed_rl.weights.layouts.megatron import chunk_prefix


def plan_classic(
    layout: CheckpointLayout,
    dtype_of: Callable[[str], torch.dtype],
    iteration: int,
    arguments: Mapping[str, Any],
) -> Target:
    """``iter_<iteration>/mp_rank_*`` of every rank of ``layout``, and the tracker file.

    Args:
        layout: one rank for each file.
        dtype_of: element type of an HF tensor; a parameter takes that of its first.
        iteration: in the name of the folder and in the files.
        arguments: what readers of the format look up in the arguments of the run.
    """
    args = argparse.Namespace(**arguments)
    files = tuple(
        _file(layout, rank, dtype_of, iteration, args) for rank in range(layout.parallel.world)
    )
    small = {TRACKER: f"{iteration}".encode()}
    return Target(files, small, {name: dtype_of(name) for name in layout.hf_shapes})


def _file(
    layout: CheckpointLayout,
    rank: int,
    dtype_of: Callable[[str], torch.dtype],
    iteration: int,
    args: argparse.Namespace,
) -> OutputFile:
    tensors = params_of_rank(layout, rank, dtype_of)
    stored = [(t.dtype, layout.stored_shape(name, t.shape)) for name, t in tensors.items()]
    vpp = layout.parallel.stages.vpp

    def objects(saved: Sequence[torch.Tensor]) -> dict[str, Any]:
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        for chunk in range(vpp):
            prefix = chunk_prefix(chunk, vpp)
            state["model" if vpp == 1 else f"model{chunk}"] = {
                param.removeprefix(prefix): tensor
                for param, tensor in zip(tensors, saved, strict=True)
                if param.startswith(prefix)
            }
        return state

    def frame(path: Path) -> list[int]:
        with path.open("wb") as file:
            save_unfilled(file, stored, objects)
        found = params_of(model_chunks(path, read_torch_file(path)))
        return [found[param].offset for param in tensors]

    path = f"iter_{iteration:07d}/{layout.folder_of(rank)}/{MODEL_FILE}"
    return OutputFile(path, tuple(tensors.values()), frame)


def run_arguments(layout: CheckpointLayout, noop_layers: Sequence[int]) -> dict[str, Any]:
    """What readers of classic checkpoints look up in the arguments of a run.

    Sources: ``check_checkpoint_args`` of Megatron-LM, ``convert_mg2hf.py`` of MindSpeed-LLM.
    """
    spec, parallel, names = layout.spec, layout.parallel, layout.names
    stages = parallel.stages
    slots = spec.num_layers + len(noop_layers)
    even = (not layout.slots and stages.is_even) or bool(noop_layers)
    fields: dict[str, Any] = {
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
        "padded_vocab_size": -(-spec.vocab_size // layout.vocab_multiple) * layout.vocab_multiple,
    }
    return fields | _architecture(spec)


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.attention
    fields: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "num_query_groups": attention.num_kv_heads,
        "group_query_attention": attention.num_kv_heads != attention.num_heads,
        "kv_channels": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_epsilon": spec.norm_eps,
        "rotary_base": spec.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "untie_embeddings_and_output_weights": not spec.tie_embeddings,
        "qk_layernorm": attention.qk_norm,
        "add_bias_linear": False,
        "add_position_embedding": True,
        "normalization": "RMSNorm",
        "swiglu": True,
    }
    if attention.qkv_bias:
        fields["add_qkv_bias"] = True
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
    if spec.latent is not None:
        fields |= {
            "multi_latent_attention": True,
            "q_lora_rank": spec.latent.q_lora_rank or None,
            "kv_lora_rank": spec.latent.kv_lora_rank,
            "qk_head_dim": spec.latent.nope_head_dim,
            "qk_pos_emb_head_dim": spec.latent.rope_head_dim,
            "v_head_dim": spec.latent.v_head_dim,
        }
    return fields
