"""What the weight sync tells a path that moves only what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from support.table_engine import CompareWeights, TableEngine, first_table

from mindspeed_rl.metrics.metric_set import Max, MetricSet
from mindspeed_rl.weights.sync import WeightPath, WeightSync
from mindspeed_rl.weights.traffic import RankTraffic

ALL, SOME = RankTraffic(0, 100, 100, 0, 0, 0, 1), RankTraffic(0, 3, 4, 0, 0, 0, 1)


class Changes:
    """A path that copies the table and notes what it is told."""

    traffic, kept_bytes = SOME, 12

    def __init__(self, engine: TableEngine) -> None:
        self.engine = engine
        self.agreed: list[tuple[list[int], bool, str]] = []
        self.done: list[int] = []
        self.loses = 0  # syncs of changes that leave the table as it was

    def agree(self, held: Sequence[int], keeps_bits: bool, why_all: str) -> bool:
        """Before the update begins, as an update loses what is held, or once more within it."""
        if why_all != "the proof found wrong weights":
            assert self.engine.weights_version == held[0]
        self.agreed.append((list(held), keeps_bits, why_all))
        return not why_all

    def finished(self, version: int) -> None:
        assert self.engine.weights_version == version, "the engine has them before"
        self.done.append(version)

    def metrics(self) -> MetricSet:
        return MetricSet({"reshard/own": Max(1.0)})

    def move(self, read: Mapping[str, torch.Tensor], engine: Any) -> None:
        lost = self.loses > 0 and not self.agreed[-1][2]
        self.loses -= lost
        if not lost:
            engine.weight_views()["table"].copy_(read["table"])


class Side:
    """A trainer and an engine of one rank."""

    def __init__(self) -> None:
        self.trainer, self.engine = first_table(), TableEngine()
        self.lines: list[str] = []
        self.changes, self.proof = Changes(self.engine), CompareWeights()
        self.path = WeightPath("direct", self.changes.move, ALL, self.changes)
        self.sync = WeightSync(
            self.path,
            cast(Any, self.proof),
            lambda: {"table": self.trainer},
            0,
            gather_versions=lambda version: [version],
            log=self.lines.append,
        )

    def why(self, version: int) -> str:
        """The reason to move all that a sync gave."""
        self.trainer -= 1
        self.sync.run(cast(Any, self.engine), version)
        assert self.changes.done[-1] == version
        return self.changes.agreed[-1][2]


def test_changes_follow_a_sync_that_was_proven() -> None:
    side = Side()
    assert side.why(1) == "this is the first sync"
    assert [side.why(2), side.why(3)] == ["", ""]
    assert side.changes.agreed == [
        ([-1], True, "this is the first sync"),
        ([1], True, ""),
        ([2], True, ""),
    ]
    assert side.changes.done == [1, 2, 3] and side.sync.kept_bytes == 12
    metrics = side.sync.metrics
    assert metrics["reshard/bytes_received"] == Max(3.0)
    assert metrics["reshard/bytes_sent"] == Max(4.0) and metrics["reshard/own"] == Max(1.0)


def test_all_weights_follow_a_load() -> None:
    side = Side()
    side.why(1)
    side.sync.weights_replaced()
    assert side.why(1) == "the trainer has loaded weights"
    assert side.why(2) == ""


def test_all_weights_follow_engines_that_freed_theirs() -> None:
    side = Side()
    side.why(1)
    side.engine.weights_version = -1
    assert side.why(2) == "the engines have freed their weights"
    assert side.why(3) == ""


def test_all_weights_follow_an_engine_with_others() -> None:
    side = Side()
    side.why(1)
    side.engine.weights_version = 9
    assert side.why(2) == "engines do not hold what the latest sync left"


def test_all_weights_follow_new_places_of_experts() -> None:
    side = Side()
    side.why(1)
    side.sync.retarget(side.path, cast(Any, side.proof), ())
    assert side.why(2) == "experts have new places"


def test_all_weights_follow_a_sync_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose weights no proof has confirmed."""
    side = Side()
    side.why(1)
    with monkeypatch.context() as patch:
        patch.setattr(side.proof, "differing_tensors", lambda *_, **__: ["table"])
        patch.setattr(side.proof, "first_difference", lambda *_: None, raising=False)
        with pytest.raises(RuntimeError, match="differ from the trainer's"):
            side.sync.run(cast(Any, side.engine), 2)
    assert side.changes.done == [1], "nobody was told that it holds version 2"
    assert side.why(3) == "the latest sync failed"
    assert side.why(4) == ""


def test_all_weights_follow_a_delta_that_was_lost() -> None:
    """At once, proven in full, with a line; the next sync is of changes again."""
    side = Side()
    side.why(1)
    side.why(2)
    side.lines.clear()
    side.changes.loses = 1
    assert side.why(3) == "the proof found wrong weights"
    assert torch.equal(side.engine.weights, side.trainer) and side.engine.weights_version == 3
    assert side.lines == [
        "warning: reshard: 1 tensors (table) differ after a sync of changes; all weights follow"
    ]
    assert side.changes.agreed[2:] == [
        ([2], True, ""),
        ([2], True, "the proof found wrong weights"),
    ]
    assert side.sync.metrics["reshard/bytes_received"] == Max(6.0), "of both moves"
    assert (side.proof.num_calls, side.proof.samples) == (2, [1, 2]), "the second proof is full"
    assert side.why(4) == "" and side.engine.calls.count("finish") == 4


def test_weights_that_differ_after_all_moved_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.why(1)
    moves: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(side.proof, "differing_tensors", lambda *_, **__: ["table"])
        patch.setattr(side.proof, "first_difference", lambda *_: moves.append(1))
        with pytest.raises(RuntimeError, match="reshard: engine weights differ"):
            side.sync.run(cast(Any, side.engine), 2)
    assert [why for *_, why in side.changes.agreed[1:]] == ["", "the proof found wrong weights"]
    assert moves == [1] and side.engine.weights_version == -1
