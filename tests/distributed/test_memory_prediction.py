"""Predicted memory of the trainer against what real engines hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from support.family_models import FAMILY_CASES, write_family_model
from support.memory_worlds import (
    SHARE_TOLERANCE,
    Measured,
    MemoryCase,
    as_predicted,
    measure_world,
)
from support.spawn import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_DIST = ("--use-distributed-optimizer",)
_TP2 = ("--tensor-model-parallel-size", "2")
_PP2 = ("--pipeline-model-parallel-size", "2")
_EP2 = ("--expert-model-parallel-size", "2")


def _mbs(size: int) -> tuple[str, ...]:
    return ("--micro-batch-size", str(size))


CASES = {"fp32": _mbs(4), "bf16": (*_mbs(1), "--bf16")}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A world, and which flags each model runs with in it."""

    num_ranks: int
    flags: tuple[str, ...]
    cases: dict[str, dict[str, tuple[str, ...]]]


LAYOUTS = {
    "one": MemoryLayout(
        1, (), {"qwen2-tied": CASES, "qwen3": CASES, "qwen3-moe": CASES, "deepseek": CASES}
    ),
    "tp2-pp2": MemoryLayout(
        4, (*_TP2, *_PP2, "--sequence-parallel", *_DIST), {"qwen2-tied": CASES, "qwen3": CASES}
    ),
    "pp2-ep2": MemoryLayout(4, (*_PP2, *_EP2, *_DIST), {"qwen3-moe": CASES}),
    "ep2": MemoryLayout(2, (*_EP2, *_DIST), {"qwen3-moe": CASES}),
    "tp2-ep2": MemoryLayout(
        2,
        (*_TP2, *_EP2, "--sequence-parallel", "--expert-tensor-parallel-size", "1", *_DIST),
        {"deepseek": CASES},
    ),
    "dp4": MemoryLayout(4, _DIST, {"qwen3": CASES}),
    "cp2": MemoryLayout(2, ("--context-parallel-size", "2", *_DIST), {"qwen3": CASES}),
    "vpp2": MemoryLayout(
        2, (*_PP2, "--num-virtual-stages-per-pipeline-rank", "2", *_DIST), {"qwen3": CASES}
    ),
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
        layout = LAYOUTS[name]
        cases = [
            MemoryCase(f"{model}/{case}", str(models(model)), flags)
            for model, several in layout.cases.items()
            for case, flags in several.items()
        ]
        flags = (*layout.flags, "--make-vocab-size-divisible-by", "8")
        folder = tmp_path_factory.mktemp(f"memory-{name}")
        return run_ranks(measure_world, layout.num_ranks, work_dir=folder, args=(flags, cases))

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
