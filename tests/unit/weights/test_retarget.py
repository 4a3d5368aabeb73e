"""A weight sync whose target changes: experts are placed with their weights, and proven."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from mindspeed_rl.weight_layouts.rollout import Slots
from mindspeed_rl.weights.sync import WeightPath, WeightSync
from mindspeed_rl.weights.traffic import RankTraffic

MOVED: tuple[tuple[int, Slots], ...] = ((0, (1, 0)), (1, (0, 1)))


class Engine:
    """Notes what a sync does, in order."""

    def __init__(self) -> None:
        self.weights_version = -1
        self.calls: list[Any] = []

    def weight_views(self) -> dict[str, torch.Tensor]:
        return {}

    def begin_update(self) -> None:
        self.calls.append("begin")
        self.weights_version = -1

    def place_experts(self, layer_experts: Any) -> None:
        self.calls.append(layer_experts)

    def finish_update(self, version: int) -> None:
        self.calls.append("finish")
        self.weights_version = version


def path_of(engine: Engine, name: str) -> WeightPath:
    """A path that notes that it was used."""
    traffic = RankTraffic(0, 1, 1, 0, 0, 0, 1)
    return WeightPath(name, lambda read, _: engine.calls.append(name), traffic)


class Proof:
    """Notes that it was asked; finds nothing, or a tensor."""

    def __init__(self, engine: Engine, name: str, wrong: tuple[str, ...] = ()) -> None:
        self._engine, self._name, self._wrong = engine, name, list(wrong)

    def differing_tensors(self, read: Any, write: Any, sample: int | None = None) -> list[str]:
        self._engine.calls.append(self._name if sample is None else f"{self._name}, a sample")
        return self._wrong

    def first_difference(self, *about: Any) -> None:
        return None


def sync_of(engine: Engine) -> WeightSync:
    """A sync that is proven in full at first alone."""
    proof = cast(Any, Proof(engine, "first proof"))
    return WeightSync(
        path_of(engine, "first"),
        proof,
        dict,
        0,
        gather_versions=lambda version: [version],
        log=print,
    )


def test_experts_are_placed_before_their_weights_come() -> None:
    engine = Engine()
    sync = sync_of(engine)
    sync.run(cast(Any, engine), 0)
    sync.run(cast(Any, engine), 1)
    first = ["begin", "first", "first proof", "finish"]
    assert engine.calls == [*first, "begin", "first", "first proof, a sample", "finish"]
    engine.calls.clear()
    sync.retarget(path_of(engine, "second"), cast(Any, Proof(engine, "second proof")), MOVED)
    assert engine.calls == [], "nothing happens before the next sync"
    sync.run(cast(Any, engine), 2)
    assert engine.calls == ["begin", MOVED, "second", "second proof", "finish"]
    engine.calls.clear()
    sync.run(cast(Any, engine), 3)
    stays = ["begin", "second", "second proof, a sample", "finish"]
    assert engine.calls == stays, "they stay where they are"


def test_wrong_weights_after_a_change_leave_the_engine_without_any() -> None:
    engine = Engine()
    sync = sync_of(engine)
    sync.run(cast(Any, engine), 0)
    sync.retarget(path_of(engine, "second"), cast(Any, Proof(engine, "proof", ("w",))), MOVED)
    with pytest.raises(RuntimeError, match="differ"):
        sync.run(cast(Any, engine), 1)
    assert engine.weights_version == -1
    engine.calls.clear()
    with pytest.raises(RuntimeError, match="differ"):
        sync.run(cast(Any, engine), 1)
    assert MOVED in engine.calls, "a sync that failed places them again"
