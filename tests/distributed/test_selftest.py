"""Every policy loss and aggregation in every layout of 2 and 4 ranks, pairwise (R35, R36, R39).

``--rl-selftest loss`` tries all of them; here each layout and cut tries some, the next one others.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.spawn import run_ranks

from mindspeed_rl.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.orchestration.selftest_cases import Finding

pytestmark = pytest.mark.distributed


Shape = tuple[int, int, int, bool]  # tp, pp, cp, sequence parallel


def findings(world: World, model: str, shapes: list[Shape], stride: int) -> list[Finding]:
    """Rank function: two aggregations of every loss, each aggregation with all kinds of losses."""
    from support.training_worlds import make_job

    from mindspeed_rl.orchestration import selftest
    from mindspeed_rl.orchestration.selftest_cases import CASES, Layout

    cases = [c for i, c in enumerate(CASES) if (i + i // 5) % 5 in (0, 2)]
    layouts = [Layout(*shape) for shape in shapes]
    return selftest.run(make_job(world, model, ()), layouts, cases, stride=stride)


def faulty(world: World, model: str) -> dict[str, list[Finding]]:
    """Rank function: one case, with our own code broken in a way that it must show."""
    from support.training_worlds import make_job

    from mindspeed_rl.orchestration import selftest
    from mindspeed_rl.orchestration.selftest_cases import CUTS, Case, Layout

    job = make_job(world, model, ())
    result = {}
    for fault, (shape, loss) in FAULTS.items():
        layouts, cases = [Layout(*shape)], [Case(loss, "token-mean")]
        with planted(fault):
            result[fault] = selftest.run(job, layouts, cases, CUTS[1:2])
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
        "sequences-of-one-rank": lambda: mock.patch.object(TrainEngine, "sum_over_context", alone),
        "selection-of-one-rank": lambda: mock.patch.object(TrainEngine, "sum_over_tokens", alone),
        "critic-local-denominator": lambda: mock.patch.object(
            value_loss, "token_weights", local_denominator
        ),
        "critic-values-of-one-rank": lambda: mock.patch.object(
            TrainEngine, "sum_over_context", alone
        ),
        "critic-rows-summed": lambda: mock.patch.object(
            heads, "gather_from_sequence_parallel_region", lambda rows, **_: gather(rows)
        ),
    }[fault]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "shapes"),
    [
        (2, [(1, 1, 1, False), (2, 1, 1, True), (1, 2, 1, False), (1, 1, 2, False)]),
        (4, [(2, 1, 2, True), (1, 2, 2, False)]),
    ],
)
def test_no_layout_shows(tmp_path: Path, ranks: int, shapes: list[Shape]) -> None:
    args = (str(model_in(tmp_path)), shapes, 7)
    found = run_ranks(findings, ranks, work_dir=tmp_path, args=args)[0]
    assert len(found) == 4 * len(shapes)
    assert [f for f in found if not f.holds] == []


def test_planted_faults_are_found(tmp_path: Path) -> None:
    """A self-test that holds under these would prove nothing."""
    found = run_ranks(faulty, 2, work_dir=tmp_path, args=(str(model_in(tmp_path)),))[0]
    assert found.pop("none")[0].holds
    assert {fault: f.gradient[0] > 1e3 for fault, (f,) in found.items()} == dict.fromkeys(
        found, True
    )


def model_in(folder: Path) -> Path:
    """A model for the flags; the self-test writes its own beside it."""
    from mindspeed_rl.data.tiny_model import write_tiny_model

    return write_tiny_model(folder / "model" / "any", num_layers=4)
