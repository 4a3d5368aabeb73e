"""Every family in every layout: log-probs of transformers, gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from support.family_models import (
    FAMILY_CASES,
    VOCAB,
    FamilyReference,
)
from support.spawn import run_ranks
from support.tiers import slow_but

if TYPE_CHECKING:
    from support.training_worlds import CaseResult, WorldResult

pytestmark = pytest.mark.distributed

# In nats.
LOGPROB_TOLERANCE = 1e-5
# Norm rule of the design: over pipelines, and over tensor, expert and context parallelism.
GRADIENT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE_SHARDED = 2e-5
# One rank against transformers in fp64.
REFERENCE_TOLERANCE = 2e-5
COMMON = (
    *("--make-vocab-size-divisible-by", "8"),
    *("--micro-batch-size", "2", "--max-tokens-per-micro-batch", "0"),
)


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """A layout, and which models can run in it."""

    num_ranks: int
    flags: tuple[str, ...]
    experts_only: bool = False
    sharded: bool = False

    def models(self) -> list[str]:
        """Names of the variants that fit."""
        return [c.name for c in FAMILY_CASES.values() if c.experts or not self.experts_only]


_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2")
_PP2 = ("--pipeline-model-parallel-size", "2")
_CP2, _CP4 = (("--context-parallel-size", size) for size in "24")
LAYOUTS = {
    "one": FamilyLayout(1, ()),
    "tp2": FamilyLayout(2, _TP2, sharded=True),
    "ep2": FamilyLayout(2, _EP2, experts_only=True, sharded=True),
    "tp2-ep2": FamilyLayout(
        2,
        (*_TP2, *_EP2, "--expert-tensor-parallel-size", "1"),
        experts_only=True,
        sharded=True,
    ),
    "uneven-pp2": FamilyLayout(2, (*_PP2, "--num-layer-list", "1,3")),
    "tp2-pp2": FamilyLayout(4, (*_TP2, *_PP2), sharded=True),
    "pp2-ep2": FamilyLayout(4, (*_PP2, *_EP2), experts_only=True, sharded=True),
    "vpp2": FamilyLayout(2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2")),
    "cp2": FamilyLayout(2, _CP2, sharded=True),
    "cp2-ring": FamilyLayout(2, (*_CP2, "--cp-comm-type", "p2p"), sharded=True),
    "cp2-ulysses": FamilyLayout(
        2, (*_CP2, "--context-parallel-algo", "ulysses_cp_algo"), sharded=True
    ),
    "cp4-ring": FamilyLayout(4, (*_CP4, "--cp-comm-type", "p2p"), sharded=True),
    "cp4-hybrid": FamilyLayout(
        4,
        (*_CP4, "--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"),
        sharded=True,
    ),
    "cp2-tp2": FamilyLayout(4, (*_CP2, *_TP2), sharded=True),
    "cp2-ep2": FamilyLayout(2, (*_CP2, *_EP2), experts_only=True, sharded=True),
    "vpp2-tp2": FamilyLayout(
        4, (*_TP2, *_PP2, "--num-virtual-stages-per-pipeline-rank", "2"), sharded=True
    ),
    "noop-pp2": FamilyLayout(2, (*_PP2, "--noop-layers", "0,5")),
    "etp2-ep2": FamilyLayout(4, (*_TP2, *_EP2), experts_only=True, sharded=True),
    "tp2-ep2-pp2": FamilyLayout(
        4,
        (*_TP2, *_PP2, "--moe-tp-extend-ep", "--use-distributed-optimizer"),
        experts_only=True,
        sharded=True,
    ),
}

QUICK = ("one", "cp2-tp2", "tp2-ep2-pp2")  # in every run; the others in turn


@pytest.fixture(scope="session")
def families(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], WorldResult]:
    """Layout name -> results of all models that fit, computed once."""
    from support.training_worlds import Case, make_samples, train_world

    @cache
    def run(name: str) -> WorldResult:
        layout = LAYOUTS[name]
        cases = [Case(m, (), "sft", num_steps=1, model=str(models[m])) for m in layout.models()]
        flags = [*layout.flags, *COMMON]
        results = run_ranks(
            train_world,
            layout.num_ranks,
            work_dir=tmp_path_factory.mktemp(f"family-{name}"),
            args=(flags, cases, cases[0].model, make_samples(VOCAB)),
        )
        return results[0]

    return run


def largest(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    assert [x.shape for x in a] == [y.shape for y in b]
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def worst_gradient(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> tuple[float, str]:
    from support.training_worlds import relative_errors

    return max((error, name) for name, error in relative_errors(found, expected).items())


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_log_probs_are_those_of_transformers(
    layout: str,
    families: Callable[[str], WorldResult],
    references: Callable[[str], FamilyReference],
) -> None:
    """Chunk borders of context parallelism included: targets were shifted before the cut."""
    world = families(layout)
    assert set(world.cases) == set(LAYOUTS[layout].models())
    for name, case in world.cases.items():
        expected = references(name)
        assert largest(case.logprobs, expected.logprobs) <= LOGPROB_TOLERANCE, name
        assert largest(case.entropies, expected.entropies) <= LOGPROB_TOLERANCE, name


@pytest.mark.parametrize("model", FAMILY_CASES)
def test_gradients_of_one_rank_are_those_of_transformers(
    model: str,
    families: Callable[[str], WorldResult],
    references: Callable[[str], FamilyReference],
) -> None:
    found, expected = families("one").cases[model].gradients, references(model).gradients
    trained = {name: g for name, g in found.items() if not name.endswith("correction_bias")}
    assert trained.keys() == expected.keys()
    error, name = worst_gradient(trained, {n: g.float() for n, g in expected.items()})
    assert error <= REFERENCE_TOLERANCE, (name, error)


@pytest.mark.parametrize("layout", slow_but([name for name in LAYOUTS if name != "one"], QUICK))
def test_gradients_follow_the_norm_rule(
    layout: str, families: Callable[[str], WorldResult]
) -> None:
    """Latent attention under tensor parallelism is where megatron-core's own spec is wrong."""
    limit = GRADIENT_TOLERANCE_SHARDED if LAYOUTS[layout].sharded else GRADIENT_TOLERANCE
    for name, case in families(layout).cases.items():
        base: CaseResult = families("one").cases[name]
        error, tensor = worst_gradient(case.gradients, base.gradients)
        assert error <= limit, (name, tensor, error)
        assert case.metrics["loss"] == pytest.approx(base.metrics["loss"], rel=1e-6)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_the_norm_counts_every_parameter_once(
    layout: str, families: Callable[[str], WorldResult]
) -> None:
    """What is clipped by; whole weights, experts and tied embeddings are on several ranks."""
    for name, case in families(layout).cases.items():
        (norm,) = case.grad_norms
        total = torch.stack([g.double().pow(2).sum() for g in case.gradients.values()]).sum()
        assert norm == pytest.approx(float(total.sqrt()), rel=1e-5), name
