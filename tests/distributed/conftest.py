"""Worlds of trained tiny models, each run once and shared by the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spawn import run_ranks

if TYPE_CHECKING:
    import torch
    from support.family_models import FamilyReference
    from support.training_worlds import Reference, WorldResult

    from mindspeed_rl.samples.packing import TrainSample


@pytest.fixture(scope="session")
def reference(tiny_model: Path, tied_model: Path) -> Reference:
    """Log-probs, entropies and gradients of transformers' Qwen2, sample by sample, unpadded."""
    import torch
    from support.training_worlds import Reference, make_samples, with_logprobs
    from transformers import AutoModelForCausalLM

    samples = make_samples(307)
    logprobs, entropies = {}, {}
    for name, folder in (("tiny", tiny_model), ("tied", tied_model)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for temperature in (1.0, 0.7):
            rows = [_response_rows(model, s) / temperature for s in samples]
            logps = [row.log_softmax(-1).detach() for row in rows]
            logprobs[name, temperature] = [
                p.gather(-1, s.token_ids[s.num_prompt_tokens :, None])[:, 0]
                for p, s in zip(logps, samples, strict=True)
            ]
            entropies[name, temperature] = [-(p.exp() * p).sum(-1) for p in logps]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    parts = []
    for s in samples:
        rows = _response_rows(model, s).log_softmax(-1)
        parts.append(rows.gather(-1, s.token_ids[s.num_prompt_tokens :, None])[:, 0])
    loss = -torch.cat(parts).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Reference(
        with_logprobs(samples, logprobs["tiny", 1.0]),
        logprobs,
        entropies,
        float(loss.detach()),
        gradients,
    )


def _response_rows(model: torch.nn.Module, sample: TrainSample) -> torch.Tensor:
    """Logits of the positions that predict the response: [response, vocabulary]."""
    logits: torch.Tensor = model(sample.token_ids[None]).logits[0]
    return logits[sample.num_prompt_tokens - 1 : -1]


@pytest.fixture(scope="session")
def trained(
    reference: Reference,
    tiny_model: Path,
    tied_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], WorldResult]:
    """Layout name of ``layouts.LAYOUTS`` -> its results; every layout runs once per session."""
    from support.training_layouts import LAYOUTS, cases_of
    from support.training_worlds import train_world

    @cache
    def run(name: str) -> WorldResult:
        layout = LAYOUTS[name]
        args = (layout.flags, cases_of(name, str(tied_model)), str(tiny_model), reference.samples)
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
