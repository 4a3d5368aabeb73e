"""Policy losses and aggregations in the layouts of four ranks, pairwise.

``--rl-selftest loss`` tries all combinations; here every pair of choices occurs in one of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.covering import covering_array
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.selftest.loss import BatchCut, Case, Finding, Layout

pytestmark = pytest.mark.distributed


Shape = tuple[int, int, int, bool]  # tp, pp, cp, sequence parallel


def findings(world: World, model: str) -> list[Finding]:
    """Rank function: a covering array of layouts, cuts, losses and aggregations."""
    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest

    return selftest.run(make_job(world, model, ()), chosen_rows(world.size))


def sizes(at: Layout, world: int) -> tuple[int | bool, ...]:
    """What a pair is made of: tp, pp, cp, dp, sequence parallelism."""
    return at.tp, at.pp, at.cp, world // (at.tp * at.pp * at.cp), at.sp


def chosen_rows(world: int) -> list[tuple[Layout, BatchCut, Case]]:
    """Every pair of tp, pp, cp, dp, sequence parallelism, cut, loss and aggregation."""
    from mindspeed_rl.selftest.loss import CASES, CUTS, layouts_of

    rows = {
        (*sizes(at, world), cut.name, case.loss, case.aggregation): (at, cut, case)
        for at in layouts_of(world)
        for cut in CUTS
        for case in CASES
    }
    return [rows[row] for row in covering_array(list(rows))]


def faulty(world: World, model: str) -> dict[str, list[Finding]]:
    """Rank function: one case, with our own code broken in a way that it must show."""
    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.selftest.loss import CUTS, Case, Layout

    job = make_job(world, model, ())
    result = {}
    for fault, (shape, loss) in FAULTS.items():
        trial = (Layout(*shape), CUTS[1], Case(loss, "token-mean"))
        with planted(fault):
            result[fault] = selftest.run(job, [trial])
    return result


FAULTS: dict[str, tuple[Shape, str]] = {
    "none": ((1, 1, 2, False), "gspo"),
    "local-denominator": ((1, 1, 1, False), "ppo"),
    "doubled-cp-scale": ((1, 1, 2, False), "ppo"),
    "sequences-of-one-rank": ((1, 1, 2, False), "gspo"),
    "selection-of-one-rank": ((1, 1, 1, False), "kl_cov"),
    "critic-local-denominator": ((1, 1, 1, False), "value"),
    "critic-values-of-one-rank": ((1, 1, 2, False), "value"),
    "critic-rows-summed": ((2, 1, 1, True), "value"),
}


def planted(fault: str) -> Any:
    """A patch of the product that shows in layouts that cut something."""
    from mindspeed_rl.algorithms import losses, value_loss
    from mindspeed_rl.algorithms.types import Sequences
    from mindspeed_rl.trainer import heads
    from mindspeed_rl.trainer.train_engine import TrainEngine

    gather = heads.gather_from_sequence_parallel_region
    weights, share = losses.token_weights, TrainEngine.forward_backward

    def local_denominator(mode: str, sequences: Sequences, counts: Any, longest: int) -> Any:
        local = replace(counts, tokens=max(1, sequences.of_token.numel()))
        return weights(mode, sequences, local, longest)

    def scaled(self: TrainEngine, batches: Any, loss: Any) -> Any:
        def doubled(inputs: Any) -> Any:
            found = loss(inputs)
            return replace(found, loss=found.loss * self.layout.parallel.cp)

        return share(self, batches, doubled)

    def alone(self: TrainEngine, values: Any) -> Any:
        return values

    return {
        "none": nullcontext,
        "local-denominator": lambda: mock.patch.object(losses, "token_weights", local_denominator),
        "doubled-cp-scale": lambda: mock.patch.object(TrainEngine, "forward_backward", scaled),
        "sequences-of-one-rank": lambda: mock.patch.object(TrainEngine, "all_reduce_cp", alone),
        "selection-of-one-rank": lambda: mock.patch.object(TrainEngine, "all_reduce_dp_cp", alone),
        "critic-local-denominator": lambda: mock.patch.object(
            value_loss, "token_weights", local_denominator
        ),
        "critic-values-of-one-rank": lambda: mock.patch.object(TrainEngine, "all_reduce_cp", alone),
        "critic-rows-summed": lambda: mock.patch.object(
            heads, "gather_from_sequence_parallel_region", lambda rows, **_: gather(rows)
        ),
    }[fault]()


@pytest.mark.slow
def test_no_layout_shows(tmp_path: Path) -> None:
    """Four ranks: every pair of choices."""
    found = run_ranks(findings, 4, work_dir=tmp_path, args=(str(model_in(tmp_path)),))[0]
    assert len({f.layout for f in found}) >= 8 and len({f.cut for f in found}) == 4
    assert [f for f in found if not f.holds] == []


def test_the_array_covers_every_pair() -> None:
    """Against all pairs of all allowed rows, counted apart."""
    from mindspeed_rl.selftest.loss import CASES, CUTS, layouts_of

    def values(at: Layout, cut: BatchCut, case: Case) -> tuple[Any, ...]:
        return (*sizes(at, 4), cut, case.loss, case.aggregation)

    everything = {
        pair
        for at in layouts_of(4)
        for cut in CUTS
        for case in CASES
        for pair in combinations(enumerate(values(at, cut, case)), 2)
    }
    chosen = chosen_rows(4)
    assert {p for row in chosen for p in combinations(enumerate(values(*row)), 2)} == everything
    assert len(chosen) < 100 < len(layouts_of(4)) * len(CUTS) * len(CASES) / 25


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path: Path) -> None:
    """A self-test that holds under these would prove nothing."""
    found = run_ranks(faulty, 2, work_dir=tmp_path, args=(str(model_in(tmp_path)),))[0]
    assert found.pop("none")[0].holds
    assert {fault: f.gradient[0] > 1e3 for fault, (f,) in found.items()} == dict.fromkeys(
        found, True
    )


def model_in(folder: Path) -> Path:
    """A model for the flags; the self-test writes its own beside it."""
    from make_tiny_model import write_tiny_model

    return write_tiny_model(folder / "model" / "any", num_layers=4)
