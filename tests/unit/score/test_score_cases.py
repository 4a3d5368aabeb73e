"""The models and layouts that the score command is proven on: every choice is among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.family_models import family_config
from support.score_cases import (
    BACKENDS,
    MAX_RANKS,
    SPLITS,
    VARIANTS,
    engine_layout,
    layouts_of,
    trainer_layout,
)

from mindspeed_rl.config import ScoreRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.planning.run_plan import check_score

TRAINER_CHOICES = {*SPLITS, "tp2", "cp2"}
ENGINE_CHOICES = {"tp1", "tp2"}
EXPERT_CHOICES = {"megatron": {"ep2"}, "engine": {"dp2", "ep2", "ep4"}}


def test_the_variants_are_all_that_tables_tell_apart() -> None:
    specs = [spec_from_hf_config(family_config(c).to_dict()) for c in VARIANTS.values()]
    told = {
        "tied": lambda s: s.tie_embeddings,
        "untied": lambda s: not s.tie_embeddings,
        "odd vocabulary": lambda s: s.vocab_size % 2,
        "even vocabulary": lambda s: not s.vocab_size % 2,
        "biases of q, k, v": lambda s: s.qkv_bias,
        "one key/value head": lambda s: not s.latent and s.num_kv_heads == 1,
        "compressed queries": lambda s: s.latent and s.latent.q_lora_rank,
        "whole queries": lambda s: s.latent and not s.latent.q_lora_rank,
        "groups of experts": lambda s: s.moe and s.moe.num_groups > 1,
        "no groups": lambda s: s.latent and s.moe.num_groups == 1,
        "yarn with latent attention": lambda s: s.latent and s.rope.kind == "yarn",
    }  # fmt: skip
    assert [name for name, has in told.items() if not any(has(s) for s in specs)] == []
    assert {s.rope.kind for s in specs} == {"default", "linear", "llama3", "yarn"}
    families = {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}
    assert {s.family for s in specs} == families


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variant_meets_every_choice(backend: str) -> None:
    choices = TRAINER_CHOICES if backend == "megatron" else ENGINE_CHOICES
    every = set().union(*(x.name.split() for v in layouts_of(backend).values() for x in v))
    for variant, layouts in layouts_of(backend).items():
        met = set().union(*(layout.name.split() for layout in layouts))
        assert met >= choices, variant
        assert max(layout.num_ranks for layout in layouts) <= MAX_RANKS
        if not VARIANTS[variant].experts:
            assert not any(layout.experts_only for layout in layouts)
    assert every >= choices | EXPERT_CHOICES[backend]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flags_ask_for_the_layout(backend: str, tmp_path: Path) -> None:
    for name in ("in.npz", "model.safetensors"):
        (tmp_path / name).touch()
    for variant, layouts in layouts_of(backend).items():
        family_config(VARIANTS[variant]).save_pretrained(tmp_path)
        for layout in layouts:
            argv = ["--hf-checkpoint", str(tmp_path), "--tokens", str(tmp_path / "in.npz")]
            argv += ["--output", "o", "--backend", backend, "--platform", "cpu", *layout.flags]
            plan = check_score(parse(ScoreRunConfig, argv, "score").config, layout.num_ranks)
            assert plan.vllm is not None
            grid, engine = plan.parallel, plan.vllm.engine
            if backend == "megatron":
                split = layout.name.split()[0]
                assert layout == trainer_layout(split, grid.tp, grid.cp, grid.ep)
                assert grid.pp == 1 + (split != "pp1")
            else:
                engines = layout.num_ranks // engine.size
                whole = engine.expert_parallel
                assert layout == engine_layout(engine.tp, engine.dp, whole=whole, engines=engines)
