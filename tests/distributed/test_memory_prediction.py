"""Predicted memory of the trainer against what real engines hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.family_models import FAMILY_CASES, write_family_model
from support.memory_worlds import SHARE_TOLERANCE, Measured, as_predicted, measure_world
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PRECISIONS = {"fp32": "--micro-batch-size 4", "bf16": "--micro-batch-size 1 --bf16"}
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_PP2 = "--pipeline-model-parallel-size 2"
_EP2 = "--expert-model-parallel-size 2"
_DIST = "--use-distributed-optimizer"
# ranks, flags, and the models that run so
LAYOUTS = {
    "one": (1, "", ("qwen2-tied", "qwen3", "qwen3-moe", "deepseek")),
    "tp2-pp2": (4, f"{_TP2} {_PP2} {_DIST}", ("qwen2-tied", "qwen3")),
    "pp2-ep2": (4, f"{_PP2} {_EP2} {_DIST}", ("qwen3-moe",)),
    "tp2-ep2": (2, f"{_TP2} {_EP2} --expert-tensor-parallel-size 1 {_DIST}", ("deepseek",)),
    "dp4": (4, _DIST, ("qwen3",)),
    "cp2": (2, f"--context-parallel-size 2 {_DIST}", ("qwen3",)),
    "vpp2": (2, f"{_PP2} --num-virtual-stages-per-pipeline-rank 2 {_DIST}", ("qwen3",)),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models whose activations outweigh what does not depend on tokens."""
    root = tmp_path_factory.mktemp("memory-models")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 136}

    @cache
    def make(name: str) -> Path:
        case = FAMILY_CASES[name]
        return write_family_model(replace(case, changes={**case.changes, **sizes}), root / name)

    return make


@pytest.fixture(scope="session")
def measured(
    models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Measured]]]:
    """Layout name -> for every rank the measured cases, run once."""

    @cache
    def run(name: str) -> list[dict[str, Measured]]:
        num_ranks, flags, names = LAYOUTS[name]
        common = f"{flags} --make-vocab-size-divisible-by 8"
        cases = {
            f"{model}/{precision}": (str(models(model)), f"{common} {more}".split())
            for model in names
            for precision, more in PRECISIONS.items()
        }
        folder = tmp_path_factory.mktemp(f"memory-{name}")
        return run_ranks(measure_world, num_ranks, work_dir=folder, args=(cases,))

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_are_predicted(
    layout: str, measured: Callable[[str], list[dict[str, Measured]]]
) -> None:
    for rank, cases in enumerate(measured(layout)):
        for name, case in cases.items():
            assert case.owners == as_predicted(case.predicted), (rank, name)
            at_start = pytest.approx(case.predicted_at_start, rel=SHARE_TOLERANCE)
            assert case.optimizer_at_start == at_start, (rank, name)
            assert min(case.owners.values()) > 0
