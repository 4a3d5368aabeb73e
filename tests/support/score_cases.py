"""The score command's models, and the layouts that each is run in.

The models are those of ``support.family_models`` and some more, in sizes that vLLM's CPU kernels
know (heads of 32 channels, latent attention that caches 512 + 64), so that trainer and engine are
compared with the same numbers of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from support.family_models import FAMILY_CASES, FamilyCase

BACKENDS = ("megatron", "engine")
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MORE = (
    FamilyCase("qwen2-even-vocab", "qwen2", {"vocab_size": 64}),
    FamilyCase("qwen3-tied-one-kv-head", "qwen3",
               {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    FamilyCase("llama-tied-linear", "llama",
               {"tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    FamilyCase("qwen3-moe-tied", "qwen3_moe",
               {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_experts": 4,
                "expert_ffn": 48},
               experts=True),
    FamilyCase("deepseek-yarn", "deepseek_v3",
               {"q_lora_rank": 12, "num_experts": 4, "expert_ffn": 64, "rope_parameters": _YARN},
               experts=True),
)  # fmt: skip
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
_WHOLE_HEADS = {"hidden_size": 128}  # vLLM's Qwen2 has heads of hidden size / heads only
_EXPERT_SIZES = {"expert_ffn": 64}
_LATENT_SIZES = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
}


def _sized(case: FamilyCase) -> FamilyCase:
    """A trainer's variant in the engine's sizes."""
    sizes: dict[str, Any] = dict(_SIZES)
    if case.family == "qwen2":
        sizes |= _WHOLE_HEADS
    if case.experts and case not in _MORE:
        sizes |= _EXPERT_SIZES
    if case.family == "deepseek_v3":
        sizes |= _LATENT_SIZES
    return replace(case, changes={**case.changes, **sizes})


VARIANTS: Mapping[str, FamilyCase] = {
    case.name: _sized(case) for case in (*FAMILY_CASES.values(), *_MORE)
}


@dataclass(frozen=True, slots=True)
class ScoreLayout:
    """A layout of one backend: the world's size and the flags that ask for it."""

    name: str
    num_ranks: int
    flags: tuple[str, ...] = ()


_PP2 = ("--pipeline-model-parallel-size", "2")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
_CP2 = ("--context-parallel-size", "2")
_ENGINE_TP2 = ("--rollout-tp", "2")
TRAINER_TP2 = ScoreLayout("tp2", 2, _TP2)
ONE_ENGINE = ScoreLayout("tp1", 1)
_LAYOUTS = {
    "megatron": (
        ScoreLayout("uneven-pp2 tp2", 4, (*_PP2, *_TP2, "--num-layer-list", "1,3")),
        ScoreLayout("vpp2", 2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
        ScoreLayout("cp2", 2, _CP2),
    ),
    "engine": (ScoreLayout("2 x tp1", 2),),
}
_DENSE_LAYOUTS = {"megatron": (), "engine": (ScoreLayout("tp2", 2, _ENGINE_TP2),)}
# An engine's experts are cut, or whole and spread; then shared experts stay whole.
_EXPERT_LAYOUTS = {
    "megatron": (
        ScoreLayout("pp2 tp2 ep2", 4, (*_PP2, *_TP2, *_EP2)),
        ScoreLayout("cp2 ep2", 2, (*_CP2, *_EP2)),
    ),
    "engine": (
        ScoreLayout("tp2 dp2", 4, (*_ENGINE_TP2, "--rollout-dp", "2")),
        ScoreLayout("tp2 dp2 ep4", 4, (*_ENGINE_TP2, "--rollout-dp", "2", "--rollout-ep", "4")),
    ),
}


def layouts_of(backend: str, case: FamilyCase) -> tuple[ScoreLayout, ...]:
    """The layouts of a backend that a model is run in."""
    return _LAYOUTS[backend] + (_EXPERT_LAYOUTS if case.experts else _DENSE_LAYOUTS)[backend]
