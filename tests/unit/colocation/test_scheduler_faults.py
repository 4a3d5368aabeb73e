"""A fault in the middle of any action leaves the state before it or the one after."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from support.engine_double import EngineDouble
from support.handover import hand_over
from support.line_faults import Planted, fault_before_line

from mindspeed_rl.colocation import host_pool, packed
from mindspeed_rl.colocation import scheduler as machine
from mindspeed_rl.colocation import storage_group as group_module
from mindspeed_rl.colocation.host_pool import HostPool
from mindspeed_rl.colocation.scheduler import CHAIN, ColocationPlan, DeviceScheduler, Phase
from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
from mindspeed_rl.engines.vllm import engine as vllm_engine
from mindspeed_rl.engines.vllm import engine_memory
from mindspeed_rl.platforms import storages
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.storages import num_bytes, storages_of
from mindspeed_rl.rollout.engine import EngineState, InferenceEngine
from mindspeed_rl.weights import sync as weight_sync
from mindspeed_rl.weights.sync import WeightSync
from mindspeed_rl.weights.traffic import RankTraffic

FILES = (
    group_module,
    host_pool,
    packed,
    storages,
    machine,
    weight_sync,
    engine_memory,
    vllm_engine,
)
# Between two actions, or after the last: not inside one.
AROUND = ("_go", "to_sync", "to_rollout", "to_train", "require", "onloaded", "_finish_release")
DROPPED = (MemoryOwner.GRAD_BUFFERS,)
VISITORS = (MemoryOwner.REFERENCE, MemoryOwner.CRITIC)  # together, or not at all


class Fill:
    """A weight path: every parameter of the engine gets the trainer's first number."""

    name, traffic = "fill", RankTraffic(0, 0, 0, 0, 0, 0, 0)

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        for view in engine.weight_views().values():
            view.fill_(float(read["w"][0]))


class NoProof:
    """Compares nothing: the test does."""

    def differing_tensors(self, read: Any, write: Any, sample: int | None = None) -> list[str]:
        return []


class World:
    """The product's phases, groups and engine around a trainer of a few tensors."""

    def __init__(self, mode: OffloadMode, free_weights: bool, late: bool = False) -> None:
        self.mode, self.free_weights, self.late = mode, free_weights, late
        self.engine = EngineDouble()
        platform = CpuPlatform()
        pool = HostPool(platform)
        self.tensors: dict[MemoryOwner, list[torch.Tensor]] = {
            MemoryOwner.PARAMETERS: [torch.arange(1.0, 41.0), torch.full((7,), 2.0)],
            MemoryOwner.GRAD_BUFFERS: [torch.zeros(40), torch.zeros(7)],
            MemoryOwner.OPTIMIZER: [torch.arange(n).float() for n in (32, 5, 16)],
            MemoryOwner.REFERENCE: [torch.arange(9.0), torch.arange(3.0)],
            MemoryOwner.CRITIC: [torch.arange(11.0), torch.arange(4.0)],
        }
        self.expected = {o: [t.clone() for t in ts] for o, ts in self.tensors.items()}
        groups = {
            owner: StorageGroup(
                owner,
                lambda tensors=tensors: tensors,  # type: ignore[misc]
                platform,
                None if owner in DROPPED else pool,
                packs=owner is MemoryOwner.OPTIMIZER,
                num_writes=(lambda: 1) if owner is MemoryOwner.REFERENCE else None,
            )
            for owner, tensors in self.tensors.items()
        }
        self.sync = WeightSync(
            cast(Any, Fill()),
            cast(Any, NoProof()),
            self._read,
            0,
            gather_versions=lambda version: [version],
            log=print,
        )
        self.optimizer = groups[MemoryOwner.OPTIMIZER]
        owners = frozenset({MemoryOwner.OPTIMIZER} if late else ())
        sharing = ColocationPlan(
            groups, mode, free_weights, owners, release_cached_memory=lambda: None
        )
        sharing.leave_all()
        self.phases = DeviceScheduler(self.engine, lambda name: nullcontext(), sharing)

    def _read(self) -> dict[str, torch.Tensor]:
        return {"w": self.tensors[MemoryOwner.PARAMETERS][0]}

    def to_rollout(self, version: int) -> None:
        hand_over(self.phases, self.sync, self.engine, version)

    def cycle(self, version: int) -> None:
        self.to_rollout(version)
        self.phases.to_train()
        with self.phases.onloaded(*VISITORS):
            pass

    def check(self) -> None:
        """All memory is where the state says, with its content; a whole engine or none."""
        state = self.phases.state
        assert state in CHAIN
        gone = set(self.mode.leaves)
        if state is Phase.TRAIN:
            gone &= {*VISITORS}
        elif state is not Phase.ROLLOUT:
            gone -= {MemoryOwner.PARAMETERS}
            if self.late and self.optimizer.is_onloaded:
                gone -= {MemoryOwner.OPTIMIZER}  # it may leave beside the sync
        for owner, tensors in self.tensors.items():
            held = [s.nbytes() > 0 for s in storages_of(tensors)]
            assert held == [owner not in gone] * len(held), (state, owner)
            if owner not in gone and owner not in DROPPED:
                pairs = zip(tensors, self.expected[owner], strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), (state, owner)
        asleep = self.free_weights and state in (Phase.TRAIN, Phase.IDLE)
        awake = EngineState.AWAKE if state is Phase.ROLLOUT else EngineState.WEIGHTS
        assert self.engine.state is (EngineState.ASLEEP if asleep else awake)
        if not asleep:
            sizes = num_bytes(storages_of(p for _, p in self.engine.toy.model.named_parameters()))
            assert sizes == self.engine.weight_bytes
        if state is Phase.ROLLOUT:
            assert self.engine.toy.cache.untyped_storage().nbytes() == self.engine.cache_bytes


def _fail(world: World, number: int, version: int) -> list[str]:
    """A cycle with a fault before its ``number``-th line, then a whole one."""
    with fault_before_line(number, FILES, AROUND) as lines:
        try:
            world.cycle(version)
        except Planted:
            world.check()
    if world.phases.state is not Phase.TRAIN:
        world.phases.to_train()
    world.check()
    world.tensors[MemoryOwner.PARAMETERS][0][0] = version
    world.expected[MemoryOwner.PARAMETERS][0][0] = version
    world.to_rollout(version + 1)
    world.check()
    weights = [p for _, p in world.engine.toy.model.named_parameters()]
    assert all(bool((w == version).all()) for w in weights), "stale weights would be sampled"
    world.phases.to_train()
    world.check()
    return lines


@pytest.mark.parametrize(
    ("mode", "free_weights", "on_host", "late"),
    [
        (OffloadMode.NONE, False, True, False),
        (OffloadMode.OPTIMIZER, False, True, False),
        (OffloadMode.ALL, True, True, False),
        (OffloadMode.ALL, True, True, True),
        (OffloadMode.ALL, True, False, False),
    ],
)
def test_a_fault_before_any_line_of_any_action(
    mode: OffloadMode,
    free_weights: bool,
    on_host: bool,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before every line of both ways, where it runs first and last; pages and storages."""
    if not on_host:
        monkeypatch.setattr(engine_memory, "discard_pages", lambda address, num_bytes: False)
    world = World(mode, free_weights, late)
    world.phases.to_train()
    world.cycle(0)  # from now on optimizer and reference leave as they do at every later switch
    whole = _fail(world, 0, 10)
    first = {line: number for number, line in reversed(list(enumerate(whole, 1)))}
    last = {line: number for number, line in enumerate(whole, 1)}
    for number in sorted({*first.values(), *last.values()}):
        _fail(world, number, 10 + 10 * number)
    functions = {line.split(":")[0] for line in whole}
    assert {"WeightSync.run", "VllmEngine.free_cache", "ZeroedMemory.free"} <= functions
    if mode is OffloadMode.ALL:
        assert {"StorageGroup.release", "StorageGroup._take_back", "HostPool.region"} <= functions
        assert {"VllmEngine.free_weights", "StorageGroup.start_release"} <= functions


def test_a_fault_while_an_optimizer_is_packed() -> None:
    """The first switch after the first update, when its tensors come back as one storage."""

    def first_switch(number: int) -> list[str]:
        world = World(OffloadMode.OPTIMIZER, False)
        with fault_before_line(number, (group_module, packed)) as lines:
            with nullcontext() if not number else pytest.raises(Planted):
                world.phases.to_train()
            world.check()
        if world.phases.state is not Phase.TRAIN:
            world.phases.to_train()
        world.check()
        return lines

    lines = first_switch(0)
    assert "StorageGroup._unpack" in {line.split(":")[0] for line in lines}
    for number in range(1, len(lines) + 1):
        first_switch(number)
