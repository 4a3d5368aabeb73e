"""The score command's models and layouts, and which of them are run: every pair of choices.

The models are those of ``support.family_models`` and some more, in sizes that vLLM's CPU kernels
know (heads of 32 channels, latent attention that caches 512 + 64), so that trainer and engine are
compared with the same numbers of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from support.covering import covering_array
from support.family_models import FAMILY_CASES, FamilyCase

BACKENDS = ("megatron", "engine")
MAX_RANKS = 4
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
    """A layout of one backend, and the flags that ask for it.

    Attributes:
        name: of the layout.
        num_ranks: of the world.
        flags: of the command.
        experts_only: it spreads experts, or engines share them.
    """

    name: str
    num_ranks: int
    flags: tuple[str, ...]
    experts_only: bool = False


_PP2 = ("--pipeline-model-parallel-size", "2")
SPLITS: Mapping[str, tuple[str, ...]] = {
    "pp1": (),
    "pp2": _PP2,
    "uneven-pp2": (*_PP2, "--num-layer-list", "1,3"),
    "vpp2": (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2"),
}


# More than two choices at once, which vLLM treats in a way of its own: shared experts stay whole.
_ALL_AT_ONCE: Mapping[str, list[tuple[Any, ...]]] = {
    "megatron": [],
    "engine": [("qwen3-moe", 2, 2, True, 1), ("deepseek", 2, 2, True, 1)],
}


def trainer_layout(split: str, tp: int, cp: int, ep: int) -> ScoreLayout:
    """The smallest world of a trainer's choices; whole experts are spread over its stages."""
    flags: list[str] = [*SPLITS[split]]
    if tp > 1:
        flags += ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"]
    if cp > 1:
        flags += ["--context-parallel-size", str(cp)]
    if ep > 1:
        flags += ["--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1"]
    sizes = "".join(f" {axis}{n}" for axis, n in (("tp", tp), ("cp", cp), ("ep", ep)) if n > 1)
    stages = 1 if split == "pp1" else 2
    return ScoreLayout(split + sizes, stages * max(tp * cp, ep), tuple(flags), ep > 1)


def engine_layout(tp: int, dp: int, *, whole: bool, engines: int) -> ScoreLayout:
    """``engines`` of ``tp x dp`` ranks; with ``whole`` experts are spread, else each is cut."""
    name = f"{f'{engines} x ' if engines > 1 else ''}tp{tp}" + (f" dp{dp}" if dp > 1 else "")
    flags = ["--rollout-tp", str(tp), "--rollout-dp", str(dp)]
    if whole:
        name += f" ep{tp * dp}"
        flags += ["--rollout-ep", str(tp * dp)]
    only = whole or dp > 1
    return ScoreLayout(name, engines * tp * dp, tuple(flags), only)


def _trainer_rows(case: FamilyCase) -> Iterator[tuple[Any, ...]]:
    for row in product(SPLITS, (1, 2), (1, 2), (1, 2)):
        layout = trainer_layout(*row)
        if layout.num_ranks <= MAX_RANKS and (case.experts or not layout.experts_only):
            yield row


def _engine_rows(case: FamilyCase) -> Iterator[tuple[Any, ...]]:
    for tp, dp, whole, engines in product((1, 2), (1, 2), (False, True), (1, 2)):
        # with vLLM 0.32 on CPU an engine with data parallelism fills the world
        possible = not (whole and tp * dp == 1) and (dp == 1 or engines == 1)
        if not possible or engines * tp * dp > MAX_RANKS:
            continue
        if case.experts or not (whole or dp > 1):
            yield tp, dp, whole, engines


def _layout_of(backend: str, row: tuple[Any, ...]) -> ScoreLayout:
    if backend == "megatron":
        return trainer_layout(*row)
    tp, dp, whole, engines = row
    return engine_layout(tp, dp, whole=whole, engines=engines)


def layouts_of(backend: str) -> dict[str, list[ScoreLayout]]:
    """Variant -> its layouts: enough for every pair of choices, the variant being one."""
    rows_of = _trainer_rows if backend == "megatron" else _engine_rows
    rows = [(case.name, *row) for case in VARIANTS.values() for row in rows_of(case)]
    found: dict[str, list[ScoreLayout]] = {name: [] for name in VARIANTS}
    for row in sorted({*covering_array(rows), *_ALL_AT_ONCE[backend]}, key=rows.index):
        found[str(row[0])].append(_layout_of(backend, tuple(row[1:])))
    return found
