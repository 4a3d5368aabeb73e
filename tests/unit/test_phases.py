"""The switch between training and rollout: legal moves, weight updates, proofs, broken states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from support.table_engine import CompareWeights, CopyWeights, TableEngine, first_table

from mindspeed_rl.phases import Phase, Phases, WeightSync


class Machine:
    """A state machine around a table engine, and everything that it did."""

    def __init__(self, verify_interval: int = 1) -> None:
        self.engine = TableEngine()
        self.proof = CompareWeights()
        self.trainer = first_table()
        self.named: list[str] = []
        sync = WeightSync(
            cast(Any, CopyWeights()),
            cast(Any, self.proof),
            lambda: {"table": self.trainer},
            verify_interval,
        )
        self.phases = Phases(cast(Any, self.engine), sync, self.phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.named.append(name)
        yield

    def step(self, version: int) -> None:
        self.phases.to_rollout(version)
        self.phases.to_train()


def test_a_cycle_wakes_weights_then_syncs_then_wakes_the_cache() -> None:
    machine = Machine()
    assert (machine.phases.state, machine.engine.calls) == (Phase.TRAIN, ["sleep"])
    machine.phases.to_rollout(5)
    assert machine.phases.state is Phase.ROLLOUT
    assert machine.engine.calls[1:] == ["wake weights", "begin", "finish", "wake kv_cache"]
    assert machine.engine.weights_version == 5
    torch.testing.assert_close(machine.engine.weights, machine.trainer, rtol=0, atol=0)
    machine.phases.to_train()
    assert machine.phases.state is Phase.TRAIN and machine.engine.calls[-1] == "sleep"
    assert machine.named == ["reshard", "wake", "sleep"]


def test_weights_move_only_when_their_version_changed() -> None:
    machine = Machine()
    for version in (0, 0, 1):
        machine.trainer = first_table() - version
        machine.step(version)
    assert machine.engine.calls.count("begin") == 2
    torch.testing.assert_close(machine.engine.weights, first_table() - 1, rtol=0, atol=0)


@pytest.mark.parametrize("call", ["to_train", "to_rollout twice", "to_train twice"])
def test_illegal_moves_are_refused_and_change_nothing(call: str) -> None:
    machine = Machine()
    phases = machine.phases
    if call != "to_train":
        phases.to_rollout(0)
    if call == "to_train twice":
        phases.to_train()
    before, calls = phases.state, list(machine.engine.calls)
    if call.startswith("to_train"):
        with pytest.raises(RuntimeError, match="train is entered from rollout only, not from tra"):
            phases.to_train()
    else:
        with pytest.raises(RuntimeError, match="rollout is entered from train only, not from rol"):
            phases.to_rollout(1)
    assert (phases.state, machine.engine.calls) == (before, calls)


def test_weights_that_differ_break_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: an engine with other bits never generates, nor does anything after it."""
    machine = Machine()

    move_all = CopyWeights.move

    def one_bit_off(self: CopyWeights, read: Mapping[str, torch.Tensor], engine: Any) -> None:
        move_all(self, read, engine)
        engine.weight_views()["table"].view(torch.int32)[3] ^= 1

    monkeypatch.setattr(CopyWeights, "move", one_bit_off)
    told = r"differ from the trainer's in 1 tensors: table; table\[3.*\] on rank 0 \(the table\)"
    with pytest.raises(RuntimeError, match=told):
        machine.phases.to_rollout(0)
    assert machine.engine.weights_version == -1, "generating stays refused"
    assert "wake kv_cache" not in machine.engine.calls
    for move in (lambda: machine.phases.to_rollout(0), machine.phases.to_train):
        with pytest.raises(RuntimeError, match="not from broken"):
            move()


def test_a_move_that_is_interrupted_breaks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()

    def interrupted(self: object, *args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CopyWeights, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.phases.to_rollout(0)
    assert machine.phases.state is Phase.BROKEN


@pytest.mark.parametrize(("interval", "num_proofs"), [(0, 1), (1, 5), (2, 3), (9, 1)])
def test_proofs_are_made_at_the_first_sync_and_every_interval(
    interval: int, num_proofs: int
) -> None:
    machine = Machine(interval)
    for version in range(5):
        machine.step(version)
    assert machine.proof.num_calls == num_proofs
