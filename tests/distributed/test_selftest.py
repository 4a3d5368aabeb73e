"""Policy losses and aggregations in the layouts of four ranks, pairwise.

``--rl-selftest loss`` tries all combinations; here every pair of choices occurs in one of them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from support.covering import covering_array
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.selftest.loss import Case, Finding, Layout

pytestmark = pytest.mark.distributed


Shape = tuple[int, int, int, bool]  # tp, pp, cp, sequence parallel


def findings(world: World, model: str) -> list[Finding]:
    """Rank function: a covering array of layouts, cuts, losses and aggregations."""
    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest

    return selftest.run(make_job(world, model, ()), chosen_rows(world.size))


def chosen_rows(world: int) -> list[tuple[Layout, str, Case]]:
    """Every pair of what a layout, its cut into micro-batches and a case consist of."""
    from mindspeed_rl.selftest.loss import trials_of

    rows = {
        (at.tp, at.pp, at.cp, world // (at.tp * at.pp * at.cp), at.sp, at.kind, at.hybrid, at.model,
         cut, case.loss, case.aggregation): (at, cut, case)
        for at, cut, case in trials_of(world)
    }  # fmt: skip
    return [rows[row] for row in covering_array(list(rows))]


def hybrid_findings(world: World, model: str) -> list[Finding]:
    """Rank function: losses that sum over sequences, and values, with rows on 1, 2 and 4 ranks."""
    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.selftest.loss import Case, Layout

    layouts = (
        Layout(cp=4, hybrid=True),
        Layout(cp=2, pp=2, hybrid=True),
        Layout(cp=2, tp=2, sp=True, hybrid=True),
    )
    cases = [
        Case("gspo", "token-mean"),
        Case("geo_mean", "seq-mean-token-mean"),
        Case("kl_cov", "token-mean"),
        Case("value", "seq-mean-token-mean"),
    ]
    trials = [(layout, "packed to 48 tokens", case) for layout in layouts for case in cases]
    return selftest.run(make_job(world, model, ()), trials)


def faulty(world: World, model: str) -> dict[str, list[Finding]]:
    """Rank function: one case, with our own code broken in a way that it must show; on rank 0."""
    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.selftest.loss import Case, Layout

    job = make_job(world, model, ())
    whole = (Layout(cp=2), "micro-batch 2", Case("gspo", "token-mean"))
    found = {"none": selftest.run(job, [whole])}
    for fault, (shape, loss, target, change) in FAULTS.items():
        trial = (Layout(*shape), "micro-batch 2", Case(loss, "token-mean"))
        with mock.patch(target, change(pkgutil.resolve_name(target))):
            found[fault] = selftest.run(job, [trial])
    return found


def _own_tokens(original: Any) -> Any:
    def changed(mode: str, sequences: Any, counts: Any, longest: int) -> Any:
        own = replace(counts, tokens=max(1, sequences.of_token.numel()))
        return original(mode, sequences, own, longest)

    return changed


def _doubled(original: Any) -> Any:
    def changed(self: Any, batches: Any, loss: Any) -> Any:
        def times_cp(inputs: Any) -> Any:
            found = loss(inputs)
            return replace(found, loss=found.loss * self.layout.parallel.cp)

        return original(self, batches, times_cp)

    return changed


def _of_one_rank(_: Any) -> Any:
    return lambda *given: given[-1]


def _summed(original: Any) -> Any:
    return lambda rows, **_: original(rows)


_ENGINE = "mindspeed_rl.trainer.train_engine.TrainEngine."
# what shows in which layout with which loss: target, and what is in its place
FAULTS: dict[str, tuple[Shape, str, str, Callable[[Any], Any]]] = {
    "local-denominator": (
        (1, 1, 1, False), "ppo", "mindspeed_rl.algorithms.losses.token_weights", _own_tokens
    ),
    "doubled-cp-scale": ((1, 1, 2, False), "ppo", _ENGINE + "forward_backward", _doubled),
    "sequences-of-one-rank": ((1, 1, 2, False), "gspo", _ENGINE + "all_reduce_row", _of_one_rank),
    "selection-of-one-rank": (
        (1, 1, 1, False), "kl_cov", _ENGINE + "all_reduce_dp_cp", _of_one_rank
    ),
    "critic-local-denominator": (
        (1, 1, 1, False), "value", "mindspeed_rl.algorithms.value_loss.token_weights", _own_tokens
    ),
    "critic-values-of-one-rank": (
        (1, 1, 2, False), "value", _ENGINE + "all_reduce_row", _of_one_rank
    ),
    "critic-rows-summed": (
        (2, 1, 1, True), "value",
        "mindspeed_rl.trainer.heads.gather_from_sequence_parallel_region", _summed,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_layout_shows(tmp_path: Path) -> None:
    """Four ranks: every pair of choices."""
    args = (str(model_in(tmp_path)),)
    found = run_ranks(findings, 4, work_dir=tmp_path, args=args, timeout_s=840.0)[0]
    assert len({f.layout for f in found}) >= 8 and len({f.cut for f in found}) == 4
    assert [f for f in found if not f.holds] == []


@pytest.mark.slow
def test_rows_on_some_context_ranks_do_not_show(tmp_path: Path) -> None:
    found = run_ranks(hybrid_findings, 4, work_dir=tmp_path, args=(str(model_in(tmp_path)),))[0]
    assert len(found) == 3 and [f for f in found if not f.holds] == []


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path: Path) -> None:
    """A self-test that holds under these would prove nothing."""
    found = run_ranks(faulty, 2, work_dir=tmp_path, args=(str(model_in(tmp_path)),))[0]
    (whole,) = found.pop("none")
    assert whole.holds
    assert [fault for fault, (f,) in found.items() if not f.gradient[0] > 1e3] == []


def model_in(folder: Path) -> Path:
    """A model for the flags; the self-test writes its own beside it."""
    from make_tiny_model import write_tiny_model

    return write_tiny_model(folder / "model" / "any", num_layers=4)
