"""The switch between training and rollout: legal moves, what is where, faults in every action."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handover import hand_over
from support.queued_copies import QueuedCopies
from support.table_engine import (
    CACHE_BYTES,
    CompareWeights,
    CopyWeights,
    TableEngine,
    first_table,
)

from mindspeed_rl.colocation import transition
from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.scheduler import ColocationPlan, DeviceScheduler, Phase
from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rollout.engine import EngineState
from mindspeed_rl.weights.sync import WeightSync

MODES = (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL)
UPDATE = {MemoryOwner.GRAD_BUFFERS, MemoryOwner.OPTIMIZER}
CRITIC_UPDATE = {MemoryOwner.CRITIC_GRAD_BUFFERS, MemoryOwner.CRITIC_OPTIMIZER}
OTHERS = {MemoryOwner.REFERENCE, MemoryOwner.REWARD_MODEL, MemoryOwner.CRITIC, *CRITIC_UPDATE}
LEAVES_IN_TRAIN: dict[OffloadMode, set[MemoryOwner]] = {
    OffloadMode.NONE: set(),
    OffloadMode.OPTIMIZER: CRITIC_UPDATE,
    OffloadMode.ALL: OTHERS,
}
DROPPED = {MemoryOwner.GRAD_BUFFERS, MemoryOwner.CRITIC_GRAD_BUFFERS}
LEAVES_IN_ROLLOUT = {
    OffloadMode.NONE: set(),
    OffloadMode.OPTIMIZER: UPDATE | CRITIC_UPDATE,
    OffloadMode.ALL: UPDATE | OTHERS | {MemoryOwner.PARAMETERS},
}


class Fault(Exception):
    """Planted."""


def lost() -> None:
    raise Fault("host memory is gone")


class Machine:
    """A state machine around a table engine and a trainer of a tensor per owner."""

    def __init__(
        self,
        verify_interval: int = 1,
        mode: OffloadMode = OffloadMode.NONE,
        free_weights: bool = False,
        platform: CpuPlatform | None = None,
        late: bool = False,
    ) -> None:
        self.engine = TableEngine()
        self.proof = CompareWeights()
        self.mode, self.free_weights, self.late = mode, free_weights, late
        self.tensors = {
            MemoryOwner.PARAMETERS: first_table(),
            MemoryOwner.GRAD_BUFFERS: torch.zeros(64),
            MemoryOwner.OPTIMIZER: torch.arange(128.0),
            MemoryOwner.REFERENCE: first_table() - 7,
            MemoryOwner.CRITIC: torch.arange(32.0) + 1,
            MemoryOwner.CRITIC_GRAD_BUFFERS: torch.zeros(32),
            MemoryOwner.CRITIC_OPTIMIZER: torch.arange(96.0) - 3,
            MemoryOwner.REWARD_MODEL: torch.arange(16.0) + 5,
        }
        self.expected = {owner: tensor.clone() for owner, tensor in self.tensors.items()}
        self.named: list[str] = []
        self.borders: list[str] = []
        self.asked_for: list[int] = []
        platform = platform or CpuPlatform()
        pool = HostPool(platform)
        self.groups = {
            owner: StorageGroup(
                owner,
                lambda tensor=tensor: [tensor],  # type: ignore[misc]
                platform,
                None if owner in DROPPED else pool,
            )
            for owner, tensor in self.tensors.items()
        }
        self.sync = WeightSync(
            cast(Any, CopyWeights()),
            cast(Any, self.proof),
            lambda: {"table": self.trainer},
            verify_interval,
            gather_versions=lambda version: [version],
            log=print,
        )
        sharing = ColocationPlan(
            self.groups,
            mode,
            free_weights,
            frozenset({MemoryOwner.OPTIMIZER} if late else ()),
            release_cached_memory=lambda: None,
            wait_for_copies=platform.wait_for_copies,
            require_free=self.asked_for.append,
            at_border=self.borders.append,
        )
        sharing.leave_all()
        self.phases = DeviceScheduler(cast(Any, self.engine), self.phase, sharing)
        self.phases.to_train()
        self.named.clear()
        self.borders.clear()
        self.engine.calls.clear()

    @property
    def trainer(self) -> torch.Tensor:
        return self.tensors[MemoryOwner.PARAMETERS]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.named.append(name)
        yield

    def to_rollout(self, version: int) -> None:
        hand_over(self.phases, self.sync, cast(Any, self.engine), version)

    def step(self, version: int) -> None:
        self.to_rollout(version)
        self.phases.to_train()

    def check(self) -> None:
        """Everything is where the state says, with its content."""
        state = self.phases.state
        away = LEAVES_IN_TRAIN if state is Phase.TRAIN else LEAVES_IN_ROLLOUT
        gone = set(away[self.mode])
        if state in (Phase.IDLE, Phase.SYNC):
            gone -= {MemoryOwner.PARAMETERS}
            if self.late and self.groups[MemoryOwner.OPTIMIZER].is_onloaded:
                gone -= {MemoryOwner.OPTIMIZER}  # it may leave beside the sync
        for owner, tensor in self.tensors.items():
            assert (tensor.untyped_storage().nbytes() == 0) == (owner in gone), (state, owner)
            if owner not in (gone | DROPPED):
                assert torch.equal(tensor, self.expected[owner]), (state, owner)
        asleep = EngineState.ASLEEP if self.free_weights else EngineState.WEIGHTS
        engine = {Phase.SYNC: EngineState.WEIGHTS, Phase.ROLLOUT: EngineState.AWAKE}
        assert self.engine.state is engine.get(state, asleep)
        if state is Phase.ROLLOUT:
            assert torch.equal(self.engine.weights, self.expected[MemoryOwner.PARAMETERS])


def test_a_cycle_wakes_weights_then_syncs_then_wakes_the_cache() -> None:
    machine = Machine()
    machine.step(5)
    assert machine.engine.calls == ["begin", "finish", "wake cache", "free cache"]
    assert machine.engine.weights_version == 5
    assert machine.named == ["offload", "offload", "wake", "sleep"]
    assert machine.borders == ["idle", "sync", "rollout", "sync", "idle", "train"]


def test_the_order_with_everything_offloaded() -> None:
    """Parameters stay until they are resharded, the cache comes when they have left.

    What an edge brings is asked for as a whole, while it can still be refused.
    """
    machine = Machine(mode=OffloadMode.ALL, free_weights=True)
    machine.asked_for.clear()
    machine.to_rollout(0)
    assert machine.engine.calls == ["wake weights", "begin", "finish", "wake cache"]
    assert machine.named == ["offload", "wake", "offload", "wake"]
    machine.phases.to_train()
    assert machine.engine.calls[4:] == ["free cache", "free weights"]
    assert machine.named[4:] == ["sleep", "onload", "sleep", "onload"]
    nbytes = {owner: tensor.nbytes for owner, tensor in machine.expected.items()}
    trainer = [nbytes[MemoryOwner.PARAMETERS], sum(nbytes[o] for o in UPDATE)]
    assert machine.asked_for == [first_table().nbytes, CACHE_BYTES, *trainer]


CRITIC = (MemoryOwner.CRITIC, *sorted(CRITIC_UPDATE))
VISITS = {"reference": (MemoryOwner.REFERENCE,), "critic": CRITIC}


def test_a_visitor_that_cannot_leave_breaks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(mode=OffloadMode.ALL)

    monkeypatch.setattr(machine.groups[MemoryOwner.CRITIC], "release", lost)
    with pytest.raises(Fault), machine.phases.onloaded(*CRITIC):
        pass
    assert machine.phases.state is Phase.BROKEN
    assert not any(machine.groups[o].is_onloaded for o in CRITIC_UPDATE), "the others left"
    with pytest.raises(RuntimeError, match="not in broken"):
        machine.phases.onloaded(*CRITIC).__enter__()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", [OffloadMode.OPTIMIZER, OffloadMode.ALL])
def test_nothing_is_read_or_given_back_before_its_copy_is_done(
    mode: OffloadMode, late: bool
) -> None:
    """On a device copies run beside the computation; only the optimizer may still be late."""
    platform = QueuedCopies()
    free_weights = mode is OffloadMode.ALL
    machine = Machine(mode=mode, free_weights=free_weights, platform=platform, late=late)
    platform.wait_for_copies()  # as TrainEngine.step
    for version in range(3):
        machine.tensors[MemoryOwner.OPTIMIZER].mul_(3)
        machine.expected[MemoryOwner.OPTIMIZER] *= 3
        machine.expected[MemoryOwner.PARAMETERS] -= 1
        machine.trainer.sub_(1)
        machine.to_rollout(version)
        machine.check()
        machine.phases.to_train()
        assert torch.equal(machine.trainer, machine.expected[MemoryOwner.PARAMETERS])
        with machine.phases.onloaded(MemoryOwner.REFERENCE, *CRITIC):
            for owner in (MemoryOwner.REFERENCE, MemoryOwner.CRITIC, MemoryOwner.CRITIC_OPTIMIZER):
                assert torch.equal(machine.tensors[owner], machine.expected[owner]), owner
        platform.wait_for_copies()
        machine.check()


def test_the_optimizer_leaves_beside_the_sync_where_it_is_late() -> None:
    """Its copies are under way when the weights move; before the cache comes it is away."""
    platform = QueuedCopies()
    machine = Machine(mode=OffloadMode.ALL, free_weights=True, platform=platform, late=True)
    platform.wait_for_copies()
    optimizer, gradients = machine.groups[MemoryOwner.OPTIMIZER], MemoryOwner.GRAD_BUFFERS
    machine.phases.to_sync()
    assert machine.phases.state is Phase.SYNC and platform.num_queued == 1
    assert optimizer.is_onloaded and not machine.groups[gradients].is_onloaded
    machine.check()
    machine.sync.run(cast(Any, machine.engine), 0)
    assert platform.num_queued == 1, "the sync waited for the copies"
    machine.phases.to_rollout()
    assert platform.num_queued == 0 and not optimizer.is_onloaded
    machine.phases.to_train()
    platform.wait_for_copies()
    machine.check()


def test_what_has_not_left_yet_stays_when_the_trainer_comes_back() -> None:
    platform = QueuedCopies()
    machine = Machine(mode=OffloadMode.ALL, free_weights=True, platform=platform, late=True)
    platform.wait_for_copies()
    address = machine.tensors[MemoryOwner.OPTIMIZER].data_ptr()
    machine.phases.to_sync()
    machine.phases.to_train()
    assert platform.num_queued == 0, "an update may write it now"
    assert machine.tensors[MemoryOwner.OPTIMIZER].data_ptr() == address
    machine.check()


def test_what_is_late_leaves_first_where_the_engines_weights_need_its_room() -> None:
    machine = Machine(mode=OffloadMode.ALL, free_weights=True, late=True)
    optimizer = machine.groups[MemoryOwner.OPTIMIZER]

    def require(num_bytes: int) -> None:
        if optimizer.is_onloaded:
            raise MemoryError("another process took memory")

    machine.phases._sharing = replace(machine.phases._sharing, require_free=require)
    machine.phases.to_sync()
    assert machine.phases.state is Phase.SYNC and not optimizer.is_onloaded
    machine.check()
    machine.phases._sharing = replace(machine.phases._sharing, require_free=lambda size: None)
    machine.phases.to_train()
    machine.check()

    def full(num_bytes: int) -> None:
        raise MemoryError("full")

    machine.phases._sharing = replace(machine.phases._sharing, require_free=full)
    with pytest.raises(MemoryError, match="full"):
        machine.phases.to_sync()
    assert machine.phases.state is Phase.IDLE
    machine.check()


@pytest.mark.parametrize("free_weights", [False, True])
@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_late_leaves_first_where_the_update_needs_its_room(
    free_weights: bool, missing: int
) -> None:
    """For staging and copies of what is sent, also where the engine keeps its weights."""
    machine = Machine(mode=OffloadMode.ALL, free_weights=free_weights, late=True)
    optimizer, staging = machine.groups[MemoryOwner.OPTIMIZER], 5000
    weights = machine.engine.weight_bytes if free_weights else 0
    asked: list[int] = []

    def require(num_bytes: int) -> None:
        asked.append(num_bytes)
        if num_bytes > weights + staging - missing:
            raise MemoryError("full")

    machine.phases._sharing = replace(
        machine.phases._sharing, require_free=require, sync_bytes=lambda: staging
    )
    machine.phases.to_sync()
    assert optimizer.is_onloaded is not bool(missing)
    assert asked == [weights + staging, *([weights] if missing and weights else [])]
    machine.check()


def test_nothing_is_refused_for_what_an_update_may_take_at_most() -> None:
    machine = Machine(mode=OffloadMode.ALL, free_weights=True)
    asked: list[int] = []
    machine.phases._sharing = replace(
        machine.phases._sharing, require_free=asked.append, sync_bytes=lambda: 1 << 60
    )
    machine.phases.to_sync()
    assert asked == [machine.engine.weight_bytes]


@pytest.mark.parametrize(("free_weights", "syncs"), [(False, 2), (True, 3)])
def test_weights_move_only_when_their_version_changed(free_weights: bool, syncs: int) -> None:
    """Or when they were freed: memory that came back as zeros is no version of the weights."""
    machine = Machine(free_weights=free_weights)
    for version in (0, 0, 1):
        machine.trainer.sub_(version)
        machine.expected[MemoryOwner.PARAMETERS] -= version
        machine.to_rollout(version)
        machine.check()
        machine.phases.to_train()
    assert machine.engine.calls.count("begin") == syncs


def test_an_engine_without_complete_weights_is_not_generated_from() -> None:
    machine = Machine()
    machine.phases.to_sync()
    with pytest.raises(RuntimeError, match="no complete weights"):
        machine.phases.to_rollout()
    machine.check()


@given(
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(
        st.sampled_from(["sync", "rollout", "train", "generate", "reference", "critic", "update"]),
        max_size=20,
    ),
)
@settings(deadline=None, max_examples=60)
def test_no_order_of_calls_leaves_memory_elsewhere(
    mode: OffloadMode, free_weights: bool, late: bool, queued: bool, calls: list[str]
) -> None:
    """After any calls, legal or refused, memory is where the state says, with its content.

    Also where copies are as late as they may be, those of the optimizer beside the sync among them.
    """
    platform = QueuedCopies() if queued else CpuPlatform()
    machine = Machine(mode=mode, free_weights=free_weights, platform=platform, late=late)
    platform.wait_for_copies()  # as TrainEngine.step
    phases, version = machine.phases, 0

    def allowed(in_states: Collection[Phase]) -> AbstractContextManager[object]:
        if phases.state in in_states:
            return nullcontext()
        return pytest.raises(RuntimeError, match=f"not (from|in) {phases.state.value}")

    def visit(*owners: MemoryOwner) -> None:
        with phases.onloaded(*owners):
            for owner in set(owners) - DROPPED:
                assert torch.equal(machine.tensors[owner], machine.expected[owner]), owner
                machine.tensors[owner].add_(1)
                machine.expected[owner] += 1

    for call in calls:
        before, told = phases.state, list(machine.engine.calls)
        if call == "update" and before is Phase.TRAIN:
            version += 1
            machine.trainer.sub_(1)
            machine.expected[MemoryOwner.PARAMETERS] -= 1
            machine.tensors[MemoryOwner.OPTIMIZER].add_(version)
            machine.expected[MemoryOwner.OPTIMIZER] += version
        elif call == "generate" and before is Phase.ROLLOUT:
            assert machine.engine.weights_version == version
        elif call == "sync":
            with allowed({Phase.TRAIN, Phase.IDLE, Phase.SYNC}):
                phases.to_sync()
        elif call == "rollout":
            with allowed({Phase.SYNC}):
                if before is Phase.SYNC:
                    machine.sync.run(cast(Any, machine.engine), version)
                phases.to_rollout()
        elif call == "train":
            with allowed({Phase.ROLLOUT, Phase.SYNC, Phase.IDLE}):
                phases.to_train()
        elif call in VISITS:
            with allowed({Phase.TRAIN}):
                visit(*VISITS[call])
        assert phases.state is not before or machine.engine.calls == told, "refused half-way"
        if phases.state is Phase.TRAIN:
            platform.wait_for_copies()
        machine.check()


def test_an_undo_that_fails_breaks_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(mode=OffloadMode.ALL)
    phases = machine.phases

    def refuse(num_bytes: int) -> None:
        raise Fault("no room")

    monkeypatch.setattr(machine.groups[MemoryOwner.PARAMETERS], "restore", lost)
    phases._sharing = replace(phases._sharing, require_free=refuse)
    told = r"offload parameters could not be taken back \(host memory is gone\)"
    with pytest.raises(transition.UndoFailed, match=told) as raised:
        machine.to_rollout(0)
    assert isinstance(raised.value.__cause__, Fault) and str(raised.value.__cause__) == "no room"
    assert phases.state is Phase.BROKEN
    for move in (phases.to_sync, phases.to_rollout, phases.to_train):
        with pytest.raises(RuntimeError, match=r"not (from|in) broken"):
            move()


def test_weights_that_differ_are_never_generated_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache stays away, generating is refused, and the next sync is proven again."""
    machine = Machine(verify_interval=0)
    machine.step(0)
    assert machine.proof.num_calls == 1

    def broken(self: CopyWeights, read: Mapping[str, torch.Tensor], engine: Any) -> None:
        raise Fault("a rank died")

    with monkeypatch.context() as patch:
        patch.setattr(CopyWeights, "move", broken)
        with pytest.raises(Fault):
            machine.to_rollout(1)
    assert (machine.phases.state, machine.engine.weights_version) == (Phase.SYNC, -1)
    move_all = CopyWeights.move

    def one_bit_off(self: CopyWeights, read: Mapping[str, torch.Tensor], engine: Any) -> None:
        move_all(self, read, engine)
        engine.weight_views()["table"].view(torch.int32)[3] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(CopyWeights, "move", one_bit_off)
        with pytest.raises(RuntimeError, match=r"table\[3.*rank 0"):
            machine.to_rollout(1)
    assert (machine.phases.state, machine.engine.weights_version) == (Phase.SYNC, -1)
    assert machine.engine.calls[-1] != "wake cache"
    machine.to_rollout(1)
    assert machine.proof.num_calls == 3
    machine.check()


@pytest.mark.parametrize(("interval", "num_proofs"), [(0, 1), (1, 5), (2, 3), (9, 1)])
def test_proofs_are_made_at_the_first_sync_and_every_interval(
    interval: int, num_proofs: int
) -> None:
    machine = Machine(interval)
    for version in range(5):
        machine.step(version)
    assert machine.proof.num_calls == num_proofs
