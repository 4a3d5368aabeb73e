"""The score command's models and layouts, and runs of it beside transformers.

The models are those of ``support.family_models`` and some more, in sizes that vLLM's CPU kernels
know (heads of 32 channels, latent attention that caches 512 + 64), so that trainer and engine are
compared with the same numbers of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from support.family_models import FAMILY_CASES, FamilyCase, write_family_model
from support.spawn import run_command
from support.whole_runs import run_entry

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
_DENSE_LAYOUTS: Mapping[str, tuple[ScoreLayout, ...]] = {
    "megatron": (),
    "engine": (ScoreLayout("tp2", 2, _ENGINE_TP2),),
}
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


def all_layouts(backend: str, experts: bool) -> tuple[ScoreLayout, ...]:
    """The layouts of a backend for models with or without experts."""
    return _LAYOUTS[backend] + (_EXPERT_LAYOUTS if experts else _DENSE_LAYOUTS)[backend]


def layouts_of(backend: str, variant: str) -> tuple[ScoreLayout, ...]:
    """The layouts of a backend that a variant is run in.

    Which weights a variant has, and how each is cut, are one choice, and which sequences a rank
    gets is another: so every variant is cut in every direction, and the first variant is run in
    all layouts.
    """
    experts = VARIANTS[variant].experts
    layouts = {layout.name: layout for layout in all_layouts(backend, experts)}
    place = [name for name, case in VARIANTS.items() if case.experts == experts].index(variant)
    if not place:
        return tuple(layouts.values())
    if backend == "megatron":  # other layouts of each family: tests/distributed/test_families.py
        return (layouts["pp2 tp2 ep2" if experts else "uneven-pp2 tp2"],)
    cuts = ("tp2 dp2", "tp2 dp2 ep4") if experts else ("tp2",)
    return (layouts[cuts[place % len(cuts)]],)


ENTRY = "mindspeed_rl.score"
TOLERANCE = 2e-4  # nats
LIMIT_S = 300.0  # on a busy machine
LENGTHS = (41, 1, 12, 2, 27, 33, 48)  # one token has nothing to score
_NUM_IDS = 64  # known to every variant
_COMMON = (
    *("--platform", "cpu", "--make-vocab-size-divisible-by", "8", "--micro-batch-size", "2"),
    *("--rollout-kv-cache-gb", "0.0625", "--tokens", "in.npz"),
)
# folder, flags, number of ranks -> what was printed
Launcher = Callable[[Path, Sequence[str], int], str]


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest absolute differences over all tokens, in nats."""

    logp: float
    entropy: float

    @property
    def largest(self) -> float:
        """Of both; no number if one is none."""
        return float(np.max([self.logp, self.entropy]))


def warm(folder: Path, flags: Sequence[str], num_ranks: int) -> str:
    """Ranks that need not import the libraries."""
    return run_command(ENTRY, flags, num_ranks, cwd=folder, timeout_s=LIMIT_S)


def torchrun(folder: Path, flags: Sequence[str], num_ranks: int) -> str:
    """As a user starts it."""
    ended = run_entry(folder, flags, entry="score", num_ranks=num_ranks, limit_s=LIMIT_S)
    assert ended.returncodes == (0,), ended.output
    return ended.output


def transformers_scores(
    model_dir: Path, sequences: Path, temperature: float = 1.0
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """log-probs and entropies [N, T] of transformers in fp32, each sequence alone and unpadded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = np.load(sequences)
    logp, entropy = (np.zeros(found["tokens"].shape, np.float32) for _ in range(2))
    for i, length in enumerate(found["length"]):
        ids = torch.tensor(found["tokens"][i, :length])
        with torch.no_grad():
            rows = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logp[i, 1:length] = rows.gather(-1, ids[1:, None])[:, 0]
        entropy[i, 1:length] = -(rows.exp() * rows).sum(-1)
    return logp, entropy


class ScoreWorld:
    """A folder with the models, the sequences (``in.npz``) and the results.

    Args:
        folder: to work in.
        launcher: of the command.
    """

    def __init__(self, folder: Path, launcher: Launcher = warm) -> None:
        self.folder, self._launcher = folder, launcher
        shape = (len(LENGTHS), max(LENGTHS))
        tokens = np.random.default_rng(0).integers(0, _NUM_IDS, shape)
        np.savez(folder / "in.npz", tokens=tokens, length=np.array(LENGTHS))
        self.expected = cache(self._expected)

    def _expected(self, variant: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """log-probs and entropies of transformers; the model is written first."""
        model = write_family_model(VARIANTS[variant], self.folder / variant)
        return transformers_scores(model, self.folder / "in.npz")

    def output(self, variant: str, backend: str, layout: ScoreLayout) -> str:
        """Name of the result in the folder."""
        return f"{variant}.{backend}.{layout.name.replace(' ', '-')}.npz"

    def difference(self, variant: str, backend: str, layout: ScoreLayout) -> Difference:
        """Run the command once.

        Raises:
            AssertionError: it failed, with its output, or its result is not of these sequences.
        """
        logp, entropy = self.expected(variant)  # writes the model
        output = self.output(variant, backend, layout)
        own = ("--hf-checkpoint", variant, "--output", output, "--backend", backend)
        told = self._launcher(self.folder, [*own, *_COMMON, *layout.flags], layout.num_ranks)
        assert f"{len(LENGTHS)} sequences, {sum(LENGTHS)} tokens: " in told, told
        found = np.load(self.folder / output)
        assert found["length"].tolist() == list(LENGTHS)
        assert found["logp"].dtype == found["entropy"].dtype == np.float32
        unscored = np.arange(max(LENGTHS))[None] >= np.array(LENGTHS)[:, None]
        unscored[:, 0] = True
        assert not found["logp"][unscored].any() and not found["entropy"][unscored].any()
        return Difference(
            float(np.abs(found["logp"] - logp).max()),
            float(np.abs(found["entropy"] - entropy).max()),
        )
