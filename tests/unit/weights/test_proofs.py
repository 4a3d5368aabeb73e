"""Which syncs are proven in full, and what follows engines that hold unexpected weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from support.table_engine import CompareWeights, CopyWeights, TableEngine, first_table

from mindspeed_rl.metrics.metric_set import reduce_metrics
from mindspeed_rl.weights.sync import WeightSync, unexpected_versions


class Side:
    """A trainer and an engine of one rank, and what the other ranks' engines hold.

    Attributes:
        others: Versions that the engines of other ranks report; ``None``: that of this one.
        lines: what was told.
    """

    def __init__(self, interval: int) -> None:
        self.trainer, self.engine = first_table(), TableEngine()
        self.proof = CompareWeights()
        self.others: Sequence[int] | None = None
        self.lines: list[str] = []
        self.sync = WeightSync(
            cast(Any, CopyWeights()),
            cast(Any, self.proof),
            lambda: {"table": self.trainer},
            interval,
            gather_versions=self._versions,
            log=self.lines.append,
        )

    def _versions(self, mine: int) -> list[int]:
        return [mine, *([mine] if self.others is None else self.others)]

    def run(self, version: int) -> str:
        """How the sync to a version was proven: ``"full"``, ``"sample N"`` or not."""
        full, samples = self.proof.num_calls, len(self.proof.samples)
        self.trainer -= 1
        self.sync.run(cast(Any, self.engine), version)
        if self.proof.num_calls > full:
            return "full"
        return f"sample {self.proof.samples[-1]}" if len(self.proof.samples) > samples else ""


@pytest.mark.parametrize(("interval", "full"), [(0, {0}), (1, set(range(7))), (3, {0, 3, 6})])
def test_a_full_proof_comes_at_first_and_at_the_interval(interval: int, full: set[int]) -> None:
    """All others are samples, numbered one after the other."""
    side = Side(interval)
    found = [side.run(version) for version in range(7)]
    assert {i for i, proof in enumerate(found) if proof == "full"} == full
    samples = [proof for proof in found if proof != "full"]
    assert samples == [f"sample {i}" for i in range(7 - len(full))]
    assert side.run(6) == "" and side.lines == []


def test_the_proof_is_a_metric() -> None:
    side = Side(0)
    side.run(0)
    assert reduce_metrics(side.sync.metrics)["reshard/proof_s"] > 0


def test_weights_that_were_loaded_are_moved_and_proven_in_full() -> None:
    """Also where their version is that of the engine."""
    side = Side(0)
    assert [side.run(v) for v in (4, 5)] == ["full", "sample 4"]
    side.sync.weights_replaced()
    assert side.run(5) == "full"
    assert torch.equal(side.engine.weights, side.trainer)
    assert side.run(6) == "sample 5"
    assert side.lines == []


def test_a_run_that_goes_on_elsewhere_samples_other_rows() -> None:
    """The first sample follows from the version with which the run began, those after it do not:

    every second version, as with two updates per step, would never come to every second row.
    """
    first, resumed = Side(0), Side(0)
    assert [first.run(v) for v in (0, 2, 4, 6)] == ["full", "sample 0", "sample 1", "sample 2"]
    assert [resumed.run(v) for v in (6, 8, 10)] == ["full", "sample 6", "sample 7"]


def test_engines_that_freed_their_weights_are_expected() -> None:
    """As they do between steps; no line, and a sample is enough."""
    side = Side(0)
    side.run(0)
    for version in (0, 1):
        side.engine.weights_version = -1
        assert side.run(version).startswith("sample")
    assert side.lines == []


@pytest.mark.parametrize(
    ("mine", "others", "told"),
    [
        (2, [-1], "ranks 1 (1 of 2) hold weights of version none"),
        (2, [7, 2, 1], "ranks 1, 3 (2 of 4) hold weights of version 7, 1"),
        (9, [9], "ranks 0, 1 (2 of 2) hold weights of version 9, 9"),
        (3, [3], "ranks 0, 1 (2 of 2) hold weights of version 3, 3"),
    ],
)
def test_unexpected_engines_get_all_weights_with_a_full_proof(
    mine: int, others: list[int], told: str
) -> None:
    """One that restarted, one of another version, all of another, and all of the wanted one.

    This rank joins the transfer although its own engine may have what it should: the others wait.
    """
    side = Side(0)
    for version in (1, 2):
        side.run(version)
    side.engine.weights_version, side.others = mine, others
    side.engine.weights.fill_(float("nan"))
    assert side.run(3) == "full"
    assert torch.equal(side.engine.weights, side.trainer)
    (line,) = side.lines
    assert told in line and "where the latest sync left 2" in line
    side.others = None
    assert side.run(4) == "sample 2"


def test_one_engine_that_restarted_is_noticed_at_the_same_version() -> None:
    """A sync to the version that all others have."""
    side = Side(0)
    side.run(2)
    side.others = [-1]
    assert side.run(2) == "full"
    assert len(side.lines) == 1


def test_weights_that_no_sync_brought_are_not_trusted() -> None:
    """At the first sync of a run, whatever version they claim."""
    side = Side(0)
    side.engine.weights_version = 0
    assert side.run(0) == "full"
    assert "where the latest sync left none" in side.lines[0]


def test_a_long_list_of_ranks_is_cut() -> None:
    line = unexpected_versions([0] * 12, 5)
    assert "ranks 0, 1, 2, 3, 4, ... (12 of 12)" in line and "version 0, 0, 0, 0, 0, where" in line
    assert unexpected_versions([5] * 12, 5) == unexpected_versions([-1] * 12, 5) == ""
