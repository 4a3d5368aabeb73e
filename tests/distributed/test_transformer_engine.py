"""Every family of Transformer Engine's modules (--transformer-impl), as far as a CPU can tell.

No CUDA device and no Transformer Engine here: megatron-core's real spec and wrappers are built on a
double with the signatures and parameters of Transformer Engine 2.11 (``support/te_double``), so a
name, a shape, an argument or a mark that does not fit ends a world. Kernels are not tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from distributed.test_families import (
    COMMON,
    GRADIENT_TOLERANCE_SHARDED,
    LOGPROB_TOLERANCE,
    REFERENCE_TOLERANCE,
    largest,
    worst_gradient,
)
from support.family_models import (
    FAMILY_CASES,
    VOCAB,
    FamilyReference,
)
from support.spawn import run_ranks

if TYPE_CHECKING:
    from support.te_world import TeResult

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_TE = ("--transformer-impl", "transformer_engine")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_EP2 = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
# name -> ranks, flags, whether only models with experts are in it
WORLDS = {
    "one": (1, (), False),
    "grouped": (1, ("--moe-grouped-gemm",), True),
    "tp2": (2, _TP2, False),
    "tp2-ep2-grouped": (2, (*_TP2, *_EP2, "--moe-grouped-gemm"), True),
}


@pytest.fixture(scope="module")
def worlds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], TeResult]:
    from support.te_world import TE_SERVER, te_world
    from support.training_worlds import Case, make_samples

    @cache
    def run(name: str) -> TeResult:
        ranks, flags, experts_only = WORLDS[name]
        names = [n for n, case in FAMILY_CASES.items() if case.experts or not experts_only]
        cases = [Case(n, (), "sft", num_steps=1, model=str(models[n])) for n in names]
        args = ([*_TE, *flags, *COMMON], cases, cases[0].model, make_samples(VOCAB))
        folder = tmp_path_factory.mktemp(name)
        result: TeResult = run_ranks(te_world, ranks, work_dir=folder, args=args, server=TE_SERVER)[
            0
        ]
        return result

    return run


@pytest.mark.parametrize("name", WORLDS)
def test_models_of_its_modules_compute_what_transformers_does(
    name: str,
    worlds: Callable[[str], TeResult],
    references: Callable[[str], FamilyReference],
) -> None:
    """Names and shapes are compared with the weight table while an engine is built."""
    world = worlds(name)
    assert ("GroupedLinear" in world.made) == ("grouped" in name)
    assert min(world.made[kind] for kind in ("RMSNorm", "Linear", "LayerNormLinear")) >= 8
    tolerance = REFERENCE_TOLERANCE + GRADIENT_TOLERANCE_SHARDED * (WORLDS[name][0] > 1)
    for model, case in world.result.cases.items():
        expected = references(model)
        assert largest(case.logprobs, expected.logprobs) <= LOGPROB_TOLERANCE, model
        found = {n: case.gradients[n] for n in expected.gradients}
        wanted = {n: g.float() for n, g in expected.gradients.items()}
        error, tensor = worst_gradient(found, wanted)
        assert error <= tolerance, (model, tensor, error)


@pytest.mark.parametrize("name", [name for name, (ranks, _, _) in WORLDS.items() if ranks > 1])
def test_norms_count_every_parameter_once(name: str, worlds: Callable[[str], TeResult]) -> None:
    """Transformer Engine marks whole weights as shards of a tensor-parallel group, too."""
    for model, case in worlds(name).result.cases.items():
        (norm,) = case.grad_norms
        total = torch.stack([g.double().pow(2).sum() for g in case.gradients.values()]).sum()
        assert norm == pytest.approx(float(total.sqrt()), rel=1e-5), model
