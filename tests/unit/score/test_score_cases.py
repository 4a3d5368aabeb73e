"""What the score command is proven on: every variant, every choice of layout; its table."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import cast

import pytest
from score_table import batches, family_table, measure, table, wrong
from support.family_models import family_config
from support.score_cases import (
    BACKENDS,
    MAX_RANKS,
    PRODUCT_RANKS,
    SPLITS,
    VARIANTS,
    ScoreLayout,
    engine_layout,
    layouts_of,
    trainer_layout,
)
from support.score_runs import Difference, ScoreWorld

from mindspeed_rl.config import ScoreRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.planning.run_plan import check_score

TRAINER_CHOICES = {*SPLITS, "tp2", "cp2"}
ENGINE_CHOICES = {"tp1", "tp2"}
EXPERT_CHOICES = {"megatron": {"ep2"}, "engine": {"dp2", "ep2", "ep4"}}


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    return {n: spec_from_hf_config(family_config(c).to_dict()) for n, c in VARIANTS.items()}


def test_the_variants_are_all_that_tables_tell_apart(specs: dict[str, ModelSpec]) -> None:
    told = {
        "tied": lambda s: s.tie_embeddings,
        "untied": lambda s: not s.tie_embeddings,
        "odd vocabulary": lambda s: s.vocab_size % 2,
        "even vocabulary": lambda s: not s.vocab_size % 2,
        "biases of q, k, v": lambda s: s.attention.qkv_bias,
        "one key/value head": lambda s: not s.latent and s.attention.num_kv_heads == 1,
        "compressed queries": lambda s: s.latent and s.latent.q_lora_rank,
        "whole queries": lambda s: s.latent and not s.latent.q_lora_rank,
        "groups of experts": lambda s: s.moe and s.moe.num_groups > 1,
        "no groups": lambda s: s.latent and s.moe.num_groups == 1,
        "yarn with latent attention": lambda s: s.latent and s.rope.kind == "yarn",
    }  # fmt: skip
    missing = [name for name, has in told.items() if not any(has(s) for s in specs.values())]
    assert missing == []
    assert {s.rope.kind for s in specs.values()} == {"default", "linear", "llama3", "yarn"}
    families = {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}
    assert {s.family for s in specs.values()} == families


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


def test_the_product_holds_the_chosen_layouts() -> None:
    for backend in BACKENDS:
        everything = layouts_of(backend, everything=True)
        for variant, layouts in layouts_of(backend).items():
            names = [layout.name for layout in everything[variant]]
            assert len(set(names)) == len(names) > len(layouts)
            assert {layout.name for layout in layouts} < set(names)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_product_of_the_trainer_is_whole(variant: str) -> None:
    """Every split x TP x CP, with experts x EP."""
    experts = VARIANTS[variant].experts
    layouts = layouts_of("megatron", everything=True)[variant]
    rows = product(SPLITS, (1, 2), (1, 2), (1, 2) if experts else (1,))
    assert layouts == [trainer_layout(*row) for row in rows]
    assert max(layout.num_ranks for layout in layouts) == PRODUCT_RANKS


class FailsTogether:
    """A world in which a variant cannot be scored."""

    def __init__(self, broken: str) -> None:
        self.broken, self.together = broken, 0

    def difference(self, variant: str, backend: str, layout: ScoreLayout) -> Difference:
        """Fail for one of them."""
        assert variant != self.broken, f"rank 0 failed on {variant}"
        return Difference(1e-6, 2e-6)

    def differences(self, variants: list[str], layout: ScoreLayout) -> dict[str, Difference]:
        """Fail for all."""
        self.together += 1
        return {variant: self.difference(variant, "megatron", layout) for variant in variants}


def test_models_of_a_layout_share_a_world_and_none_hides_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pp1, pp2 = (trainer_layout(split, 1, 1, 1) for split in ("pp1", "pp2"))
    engine = engine_layout(1, 1, whole=False, engines=1)
    runs = [("megatron", name, layout) for name in ("qwen3", "deepseek") for layout in (pp1, pp2)]
    runs += [("engine", name, engine) for name in ("qwen3", "deepseek")]
    assert batches(runs, together=False) == [[run] for run in runs]
    together = batches(runs, together=True)
    assert together == [[runs[0], runs[2]], [runs[1], runs[3]], [runs[4]], [runs[5]]]
    for broken, failed in (("none", []), ("qwen3", ["megatron/qwen3/pp1"])):
        world = FailsTogether(broken)
        found = measure(together[0], cast(ScoreWorld, world))
        assert list(found) == ["megatron/qwen3/pp1", "megatron/deepseek/pp1"]
        assert [key for key, value in found.items() if isinstance(value, str)] == failed
        assert found["megatron/deepseek/pp1"] == [1e-6, 2e-6] and world.together == 1
    assert "pp1, together: rank 0 failed on qwen3" in capsys.readouterr().err


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_flags_ask_for_the_layout(variant: str, tmp_path: Path) -> None:
    family_config(VARIANTS[variant]).save_pretrained(tmp_path)
    for name in ("in.npz", "model.safetensors"):
        (tmp_path / name).touch()
    for backend in BACKENDS:
        for layout in layouts_of(backend, everything=True)[variant]:
            argv = ["--hf-checkpoint", str(tmp_path), "--tokens", str(tmp_path / "in.npz")]
            argv += ["--output", "o", "--backend", backend, "--platform", "cpu", *layout.flags]
            plan = check_score(parse(ScoreRunConfig, argv, "score").config, layout.num_ranks)
            assert plan.rollout_layout is not None
            grid, engine = plan.parallel, plan.rollout_layout.engine
            if backend == "megatron":
                choices = (layout.column, grid.tp, grid.cp, grid.ep)
                assert layout == trainer_layout(*choices)
                assert grid.pp == 1 + (layout.column != "pp1")
            else:
                engines = layout.num_ranks // engine.size
                whole = engine.expert_parallel
                assert layout == engine_layout(engine.tp, engine.dp, whole=whole, engines=engines)


def test_the_table_shows_numbers_and_the_end_says_what_is_wrong() -> None:
    runs = [
        ("megatron", "qwen3", trainer_layout("pp2", 1, 1, 1)),
        ("megatron", "qwen3", trainer_layout("pp2", 2, 1, 1)),
        ("megatron", "qwen2-tied", trainer_layout("pp1", 1, 1, 1)),
        ("megatron", "qwen3", trainer_layout("vpp2", 1, 1, 1)),
        ("megatron", "qwen3", trainer_layout("vpp2", 1, 2, 1)),
    ]
    results = {
        "megatron/qwen3/pp2": [1e-6, 2e-6],
        "megatron/qwen3/pp2 tp2": [1e-6, 3e-4],
        "megatron/qwen2-tied/pp1": "rank 0 failed\nmore",
        "megatron/qwen3/vpp2": [0.0, float("nan")],
    }
    assert table("megatron", runs, results).splitlines() == [
        "--backend megatron",
        "",
        "| model | pp2 | pp1 | vpp2 |",
        "|---|---|---|---|",
        "| qwen3 | 1e-6, 2e-6; tp2: 1e-6, 3e-4 |  | 0e+00, nan; cp2: not run |",
        "| qwen2-tied |  | failed |  |",
    ]
    assert wrong(runs, results) == [
        "megatron/qwen3/pp2 tp2: 1.0e-06, 3.0e-04 nats, allowed 0.0002",
        "megatron/qwen2-tied/pp1: rank 0 failed",
        "megatron/qwen3/vpp2: 0.0e+00, nan nats, allowed 0.0002",
        "megatron/qwen3/vpp2 cp2: not run",
    ]


def test_the_table_of_families_shows_the_worst_of_their_models() -> None:
    pp1, pp2 = (trainer_layout(split, 1, 1, 1) for split in ("pp1", "pp2"))
    runs = [("megatron", v, layout) for v in ("qwen3", "qwen3-tied-one-kv-head", "deepseek")
            for layout in (pp1, pp2)]  # fmt: skip
    results = {
        "megatron/qwen3/pp1": [1e-6, 4e-6],
        "megatron/qwen3-tied-one-kv-head/pp1": [3e-6, 2e-6],
        "megatron/qwen3/pp2": [1e-6, 2e-6],
        "megatron/qwen3-tied-one-kv-head/pp2": "rank 0 failed",
        "megatron/deepseek/pp1": [5e-6, 1e-6],
    }
    assert family_table("megatron", runs, results).splitlines()[2:] == [
        "| layout | qwen3 | deepseek_v3 |",
        "|---|---|---|",
        "| pp1 | 3e-6, 4e-6 | 5e-6, 1e-6 |",
        "| pp2 | 1e-6, 2e-6, 1 lack | 1 lack |",
    ]
