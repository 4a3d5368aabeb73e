"""Micro-batches of their own lengths train as micro-batches that are padded to the longest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.spawn import run_ranks
from support.tiers import slow_but

if TYPE_CHECKING:
    from support.training_worlds import WorldResult

pytestmark = pytest.mark.distributed

# Only the order of sums differs, and the padding that experts see.
TOLERANCE = 1e-6
# Four ranks round the sums of a row in as many parts; measured in qwen3-moe: 1.2e-6 with gathered
# keys and with the hybrid, 1.9e-6 with a ring.
TOLERANCE_CP4 = 3e-6
# Two sequences each, so that lengths differ; every pipeline has several micro-batches in flight.
COMMON = ("--make-vocab-size-divisible-by", "8", "--micro-batch-size", "2",
          "--max-tokens-per-micro-batch", "0")  # fmt: skip
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")
_CP2 = ("--context-parallel-size", "2")
_VPP2 = ("--num-virtual-stages-per-pipeline-rank", "2")
EXPERTS = ("qwen3-moe", "deepseek")
# ranks, flags, models
LAYOUTS = {
    "tp2-pp2-ep2": (4, (*_TP2, *_PP2, *_EP2, "--expert-tensor-parallel-size", "1"), EXPERTS),
    "vpp2": (2, (*_PP2, *_VPP2), ("llama-yarn", "qwen3", "qwen3-moe")),
    "vpp2-pp4": (4, ("--pipeline-model-parallel-size", "4", "--noop-layers", "1,3,5,7", *_VPP2),
                 ("qwen3",)),
    "vpp2-tp2": (4, (*_TP2, *_PP2, *_VPP2), ("qwen2-tied", *EXPERTS)),
    "cp2-pp2": (4, (*_CP2, *_PP2), ("llama-yarn", "qwen3", *EXPERTS)),
    "cp2-ep2": (2, (*_CP2, *_EP2), EXPERTS),
    "cp2-pp2-ring": (4, (*_CP2, *_PP2, "--cp-comm-type", "p2p"), ("llama-yarn", *EXPERTS)),
    "cp2-ulysses": (2, (*_CP2, "--cp-comm-type", "a2a"), ("llama-yarn", *EXPERTS)),
    "cp4-hybrid": (4, ("--context-parallel-size", "4", "--cp-comm-type", "a2a+p2p",
                       "--ulysses-degree-in-cp", "2"), ("llama-yarn", *EXPERTS)),
    "dp2-ep2": (2, _EP2, EXPERTS),
    "tp2": (2, _TP2, ("qwen2-tied", "llama-yarn", "qwen3", *EXPERTS)),
}  # fmt: skip
QUICK = ("tp2-pp2-ep2", "vpp2")


@pytest.fixture(scope="session")
def worlds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], WorldResult]:
    from support.family_models import VOCAB
    from support.training_worlds import Case, make_samples, train_world

    @cache
    def run(name: str) -> WorldResult:
        ranks, flags, names = LAYOUTS[name]
        cases = [
            Case(f"{model}/{kind}", extra, "sft", model=str(models[model]))
            for model in names
            for kind, extra in (("own", ()), ("equal", ("--equal-micro-batch-lengths",)))
        ]
        args = ([*flags, *COMMON], cases, cases[0].model, make_samples(VOCAB))
        folder = tmp_path_factory.mktemp(f"rows-{name}")
        result: WorldResult = run_ranks(train_world, ranks, work_dir=folder, args=args)[0]
        return result

    return run


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, QUICK))
def test_own_lengths_train_as_equal_ones(layout: str, worlds: Callable[[str], WorldResult]) -> None:
    from support.training_worlds import relative_errors

    found = worlds(layout).cases
    tolerance = TOLERANCE_CP4 if layout.startswith("cp4") else TOLERANCE
    for model in LAYOUTS[layout][2]:
        own, equal = found[f"{model}/own"], found[f"{model}/equal"]
        for a, b in zip(own.logprobs, equal.logprobs, strict=True):
            assert float((a - b).abs().max()) <= tolerance, model
        errors = relative_errors(own.gradients, equal.gradients)
        worst = max((error, name) for name, error in errors.items())
        assert worst[0] <= tolerance, (model, worst)
