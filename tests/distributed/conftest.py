"""Worlds of trained tiny models, each run once and shared by the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spawn import run_ranks

if TYPE_CHECKING:
    from support.family_models import FamilyReference
    from support.training_worlds import WorldResult


@pytest.fixture(scope="session")
def reference(tiny_model: Path, tied_model: Path) -> dict[tuple[str, float], FamilyReference]:
    """Log-probs, entropies and gradients of transformers' Qwen2, by (model, temperature)."""
    from support.family_models import family_reference
    from support.training_worlds import make_samples

    samples = make_samples(307)
    return {
        (name, temperature): family_reference(folder, samples, temperature)
        for name, folder in (("tiny", tiny_model), ("tied", tied_model))
        for temperature in (1.0, 0.7)
    }


@pytest.fixture(scope="session")
def trained(
    reference: dict[tuple[str, float], FamilyReference],
    tiny_model: Path,
    tied_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], WorldResult]:
    """Layout name of ``layouts.LAYOUTS`` -> its results; every layout runs once per session."""
    from support.training_layouts import LAYOUTS, cases_of
    from support.training_worlds import make_samples, train_world, with_logprobs

    samples = with_logprobs(make_samples(307), reference["tiny", 1.0].logprobs)

    @cache
    def run(name: str) -> WorldResult:
        layout = LAYOUTS[name]
        args = (layout.flags, cases_of(name, str(tied_model)), str(tiny_model), samples)
        folder = tmp_path_factory.mktemp(name)
        results = run_ranks(train_world, layout.num_ranks, work_dir=folder, args=args)
        result: WorldResult = results[0]
        return result

    return run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every variant of every family."""
    from support.family_models import FAMILY_CASES, write_family_model

    root = tmp_path_factory.mktemp("families")
    return {name: write_family_model(c, root / name) for name, c in FAMILY_CASES.items()}


@pytest.fixture(scope="session")
def references(models: dict[str, Path]) -> Callable[[str], FamilyReference]:
    """Variant -> log-probs, entropies and gradients of transformers."""
    from support.family_models import VOCAB, family_reference
    from support.training_worlds import make_samples

    return cache(lambda name: family_reference(models[name], make_samples(VOCAB)))
