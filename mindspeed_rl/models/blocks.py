"""Parts of decoder models as rows: parameter names in trainer and engines, and how each is cut.

Families compose their weight tables from these blocks. A row whose condition the model does not
fulfil (no bias, no query norm, ...) does not exist, so one block serves all variants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rl.models.attention_rules import GroupedQKV, HeadSplit, StackedQKV
from mindspeed_rl.models.expert_rules import PerExpert, StackedExperts
from mindspeed_rl.models.rules import (
    Block,
    GateUp,
    Joined,
    Replicated,
    Split,
    Stage,
    Vocab,
    WeightRow,
)

_M, _H = "decoder.layers.{l}.", "model.layers.{l}."
EMBED_NAME = _EMBED = "model.embed_tokens.weight"
_HEAD, _NORM = "lm_head.weight", "model.norm.weight"
#: Head of a sequence classifier with one label, as transformers names it.
VALUE_HEAD = "score.weight"


def _vllm(*rows: WeightRow) -> dict[str, tuple[WeightRow, ...]]:
    """The rows of vLLM. Rows of another engine are added by ``_vllm(...) | {"name": (...)}``."""
    return {"vllm": rows}


EMBEDDING = Block(
    trainer=(Vocab("embedding.word_embeddings.weight", stage="first", hf=_EMBED),),
    engines=_vllm(Vocab(_EMBED, stage="first", hf=_EMBED)),
)

HEAD = Block(
    trainer=(
        Replicated("decoder.final_layernorm.weight", stage="last", hf=_NORM),
        Vocab("output_layer.weight", stage="last", hf=_HEAD, tied_to=_EMBED, when="lm_head"),
        Replicated(
            "output_layer.weight",
            stage="last",
            hf=VALUE_HEAD,
            dims=("num_values", "hidden_size"),
            when="value_head",
        ),
    ),
    engines=_vllm(
        Replicated(_NORM, stage="last", hf=_NORM),
        Vocab(_HEAD, stage="last", hf=_HEAD, tied_to=_EMBED),
    ),
)


def _of_kind(
    kind: Stage,
    *,
    trainer: tuple[WeightRow, ...],
    engines: Mapping[str, tuple[WeightRow, ...]],
) -> Block:
    """Make a block of rows that only layers of one kind have."""

    def with_kind(rows: tuple[WeightRow, ...]) -> tuple[WeightRow, ...]:
        return tuple(replace(row, stage=kind) for row in rows)

    return Block(with_kind(trainer), {name: with_kind(rows) for name, rows in engines.items()})


def _norms(prefix: str, second: str) -> tuple[WeightRow, ...]:
    """The two norms of a layer; ``second`` is the local name of the one before the MLP."""
    return (
        Replicated(prefix + "input_layernorm.weight", hf=_H + "input_layernorm.weight"),
        Replicated(prefix + second, hf=_H + "post_attention_layernorm.weight"),
    )


_QKV, _QKV_BIAS = f"{_H}self_attn.{{p}}_proj.weight", f"{_H}self_attn.{{p}}_proj.bias"
_O_PROJ = f"{_H}self_attn.o_proj.weight"


def _head_norms(query: str, key: str) -> tuple[WeightRow, ...]:
    return (
        Replicated(query, hf=f"{_H}self_attn.q_norm.weight", dims=("head_dim",), when="qk_norm"),
        Replicated(key, hf=f"{_H}self_attn.k_norm.weight", dims=("head_dim",), when="qk_norm"),
    )


GROUPED_ATTENTION = _of_kind(
    "grouped",
    trainer=(
        *_norms(_M, "pre_mlp_layernorm.weight"),
        GroupedQKV(_M + "self_attention.linear_qkv.weight", hf=_QKV),
        GroupedQKV(_M + "self_attention.linear_qkv.bias", hf=_QKV_BIAS, bias=True, when="qkv_bias"),
        *_head_norms(
            _M + "self_attention.q_layernorm.weight", _M + "self_attention.k_layernorm.weight"
        ),
        HeadSplit(
            _M + "self_attention.linear_proj.weight",
            hf=_O_PROJ,
            dims=("hidden_size", "attention_size"),
            dim=1,
        ),
    ),
    engines=_vllm(
        *_norms(_H, "post_attention_layernorm.weight"),
        StackedQKV(_H + "self_attn.qkv_proj.weight", hf=_QKV),
        StackedQKV(_H + "self_attn.qkv_proj.bias", hf=_QKV_BIAS, bias=True, when="qkv_bias"),
        *_head_norms(f"{_H}self_attn.q_norm.weight", f"{_H}self_attn.k_norm.weight"),
        HeadSplit(_O_PROJ, hf=_O_PROJ, dims=("hidden_size", "attention_size"), dim=1),
    ),
)

_Q_A, _Q_B = f"{_H}self_attn.q_a_proj.weight", f"{_H}self_attn.q_b_proj.weight"
_Q_PLAIN = f"{_H}self_attn.q_proj.weight"
_KV_A, _KV_B = f"{_H}self_attn.kv_a_proj_with_mqa.weight", f"{_H}self_attn.kv_b_proj.weight"
_Q_A_NORM = f"{_H}self_attn.q_a_layernorm.weight"
_KV_A_NORM = f"{_H}self_attn.kv_a_layernorm.weight"


def _latent_up(query: str, plain: str, key_value: str, output: str) -> tuple[WeightRow, ...]:
    """Rows of latent attention that are cut by heads; trainer and engine differ in names only."""
    return (
        HeadSplit(query, hf=_Q_B, dims=("q_size", "q_lora_rank"), when="compressed_query"),
        HeadSplit(plain, hf=_Q_PLAIN, dims=("q_size", "hidden_size"), when="plain_query"),
        HeadSplit(key_value, hf=_KV_B, dims=("kv_b_size", "kv_lora_rank")),
        HeadSplit(output, hf=_O_PROJ, dims=("hidden_size", "attention_size"), dim=1),
    )


def _latent_norms(query: str, key_value: str) -> tuple[WeightRow, ...]:
    return (
        Replicated(query, hf=_Q_A_NORM, dims=("q_lora_rank",), when="compressed_query"),
        Replicated(key_value, hf=_KV_A_NORM, dims=("kv_lora_rank",)),
    )


_A = _M + "self_attention."
LATENT_ATTENTION = _of_kind(
    "latent",
    trainer=(
        *_norms(_M, "pre_mlp_layernorm.weight"),
        Replicated(
            _A + "linear_q_down_proj.weight",
            hf=_Q_A,
            dims=("q_lora_rank", "hidden_size"),
            when="compressed_query",
        ),
        Replicated(_A + "linear_kv_down_proj.weight", hf=_KV_A, dims=("kv_a_size", "hidden_size")),
        *_latent_norms(_A + "q_layernorm.weight", _A + "kv_layernorm.weight"),
        *_latent_up(
            _A + "linear_q_up_proj.weight",
            _A + "linear_q_proj.weight",
            _A + "linear_kv_up_proj.weight",
            _A + "linear_proj.weight",
        ),
    ),
    engines=_vllm(
        *_norms(_H, "post_attention_layernorm.weight"),
        Joined(
            _H + "self_attn.fused_qkv_a_proj.weight",
            parts=((_Q_A, "q_lora_rank"), (_KV_A, "kv_a_size")),
            when="compressed_query",
        ),
        Replicated(_KV_A, hf=_KV_A, dims=("kv_a_size", "hidden_size"), when="plain_query"),
        *_latent_norms(_Q_A_NORM, _KV_A_NORM),
        *_latent_up(_Q_B, _Q_PLAIN, _KV_B, _O_PROJ),
    ),
)

_GATE_UP, _DOWN = f"{_H}mlp.{{p}}_proj.weight", f"{_H}mlp.down_proj.weight"
_DENSE_DOWN = ("hidden_size", "ffn_hidden_size")

DENSE_MLP = Block(
    trainer=(
        GateUp(_M + "mlp.linear_fc1.weight", stage="dense", hf=_GATE_UP),
        Split(_M + "mlp.linear_fc2.weight", stage="dense", hf=_DOWN, dims=_DENSE_DOWN, dim=1),
    ),
    engines=_vllm(
        GateUp(_H + "mlp.gate_up_proj.weight", stage="dense", hf=_GATE_UP),
        Split(_DOWN, stage="dense", hf=_DOWN, dims=_DENSE_DOWN, dim=1),
    ),
)

_EXPERT_GATE_UP = GateUp(
    "", hf=f"{_H}mlp.experts.{{e}}.{{p}}_proj.weight", dims=("expert_ffn_size", "hidden_size")
)
_EXPERT_DOWN = Split(
    "",
    hf=f"{_H}mlp.experts.{{e}}.down_proj.weight",
    dims=("hidden_size", "expert_ffn_size"),
    dim=1,
)


def _router(weight: str, bias: str) -> tuple[WeightRow, ...]:
    return (
        Replicated(
            weight, stage="moe", hf=f"{_H}mlp.gate.weight", dims=("num_experts", "hidden_size")
        ),
        Replicated(
            bias,
            stage="moe",
            hf=f"{_H}mlp.gate.e_score_correction_bias",
            dims=("num_experts",),
            when="router_bias",
            dtype="float32",
        ),
    )


def _shared_experts(gate_up: str, down: str) -> tuple[WeightRow, ...]:
    return (
        GateUp(
            gate_up,
            stage="moe",
            hf=f"{_H}mlp.shared_experts.{{p}}_proj.weight",
            dims=("shared_ffn_size", "hidden_size"),
            when="shared_ffn_size",
        ),
        Split(
            down,
            stage="moe",
            hf=f"{_H}mlp.shared_experts.down_proj.weight",
            dims=("hidden_size", "shared_ffn_size"),
            dim=1,
            when="shared_ffn_size",
        ),
    )


_LOCAL_EXPERT = _M + "mlp.experts.local_experts.{e}."
EXPERTS = Block(
    trainer=(
        *_router(_M + "mlp.router.weight", _M + "mlp.router.expert_bias"),
        PerExpert(_LOCAL_EXPERT + "linear_fc1.weight", stage="moe", inner=_EXPERT_GATE_UP),
        PerExpert(_LOCAL_EXPERT + "linear_fc2.weight", stage="moe", inner=_EXPERT_DOWN),
        *_shared_experts(
            _M + "mlp.shared_experts.linear_fc1.weight", _M + "mlp.shared_experts.linear_fc2.weight"
        ),
    ),
    engines=_vllm(
        *_router(_H + "mlp.gate.weight", _H + "mlp.gate.e_score_correction_bias"),
        StackedExperts(
            _H + "mlp.experts.routed_experts.w13_weight", stage="moe", inner=_EXPERT_GATE_UP
        ),
        StackedExperts(
            _H + "mlp.experts.routed_experts.w2_weight", stage="moe", inner=_EXPERT_DOWN
        ),
        *_shared_experts(
            _H + "mlp.shared_experts.gate_up_proj.weight",
            _H + "mlp.shared_experts.down_proj.weight",
        ),
    ),
)
