"""The state machine of the shared devices, through which trainer and engine take turns.

What is on the device in each state, once the mode ``auto`` is resolved::

    state     trainer: parameters  gradients, optimizer  engine: weights  cache
    TRAIN              yes         yes                   unless freed     no
    IDLE               yes         unless offloaded      unless freed     no
    SYNC               yes         unless offloaded      yes              no
    ROLLOUT            unless      unless offloaded      yes              yes
                       offloaded

A change of state follows the chain TRAIN - IDLE - SYNC - ROLLOUT, one edge after another. An edge
is a list of actions, each with its undo: an error within an edge restores the state before it and
the memory of that state. If an undo fails as well the state is BROKEN, in which every call raises.

Where the memory of both allows it (``late``), the copies of the optimizer state to the host only
begin on the way to SYNC. They run beside the reshard; the state is freed on the way to ROLLOUT.

Towards ROLLOUT: drop gradients (an update zeroes them itself), offload the optimizer | bring back
engine weights | reshard, verify, offload parameters, bring back the cache. Parameters stay after an
update because they are about to be resharded; the cache comes last, when all other memory is free.
Towards TRAIN: free the cache, bring back parameters | free engine weights | gradients, optimizer.

Offloaded memory of the reference, the critic, the reward model and the teachers stays on the host
in TRAIN as well, and is brought back for their own passes and updates
(:meth:`DeviceScheduler.onloaded`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from mindspeed_rl.colocation.storage_group import StorageGroup
from mindspeed_rl.colocation.transition import Action, UndoFailed, nothing, perform
from mindspeed_rl.core.memory import LEAVING, UPDATE_STATE, MemoryOwner, OffloadMode
from mindspeed_rl.rollout.engine import InferenceEngine


class Phase(enum.Enum):
    """The state of the devices: who uses them, or that nobody does."""

    TRAIN = "train"
    IDLE = "idle"
    SYNC = "sync"
    ROLLOUT = "rollout"
    BROKEN = "broken"


CHAIN = (Phase.TRAIN, Phase.IDLE, Phase.SYNC, Phase.ROLLOUT)


@dataclass(frozen=True, slots=True)
class ColocationPlan:
    """Which memory is offloaded or freed between the phases, and the hooks to do so.

    Attributes:
        groups: The trainer's memory by owner.
        mode: Which owners are offloaded; not ``AUTO``.
        free_engine_weights: Whether engine weights are freed while the trainer trains.
        late: Owners among those of the update whose memory stays in SYNC, after a step, while it is
            copied to the host.
        release_cached_memory: Makes the allocator return freed memory to the device.
        wait_for_copies: Makes later computation wait for copies to the device.
        require_free: Called with the bytes that are about to be allocated; raises when fewer are
            free.
        sync_bytes: Returns the most bytes that the next weight update allocates besides weights.
        at_border: Called with the state that was just reached.
    """

    groups: Mapping[MemoryOwner, StorageGroup] = field(default_factory=dict)
    mode: OffloadMode = OffloadMode.NONE
    free_engine_weights: bool = False
    late: frozenset[MemoryOwner] = frozenset()
    release_cached_memory: Callable[[], None] = nothing
    wait_for_copies: Callable[[], None] = nothing
    require_free: Callable[[int], None] = lambda num_bytes: None
    sync_bytes: Callable[[], int] = lambda: 0
    at_border: Callable[[str], None] = lambda state: None

    def leaving(self, *owners: MemoryOwner) -> list[StorageGroup]:
        """Return the groups of these owners that are offloaded in this mode."""
        leave = self.mode.leaves
        return [self.groups[o] for o in owners if o in self.groups and o in leave]

    def leave_all(self) -> None:
        """Offload all groups of the mode, as ROLLOUT expects. Local."""
        for group in self.leaving(*LEAVING):
            group.release()
        self.release_cached_memory()


class DeviceScheduler:
    """Owns the state of the shared devices, which starts as ROLLOUT.

    Args:
        engine: The inference engine of this rank, awake.
        phase: Context manager that names a phase for timers and the watchdog.
        sharing: Memory to offload and free; the groups of its mode are offloaded already.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        phase: Callable[[str], AbstractContextManager[None]],
        sharing: ColocationPlan | None = None,
    ) -> None:
        self._engine = engine
        self._phase = phase
        self._sharing = sharing or ColocationPlan()
        self.state = Phase.ROLLOUT

    def to_sync(self) -> None:
        """Make room for the engine's weights besides the trainer's. Local.

        Before: TRAIN, IDLE or SYNC. After: SYNC, in which the weights are resharded.

        Raises:
            RuntimeError: Called in another state.
        """
        self._go(Phase.SYNC, Phase.TRAIN, Phase.IDLE, Phase.SYNC)

    def to_rollout(self) -> None:
        """Hand the devices to the engine, whose weights are complete. Local.

        Before: SYNC. After: ROLLOUT.

        Raises:
            RuntimeError: Called in another state, or the engine has no complete weights.
        """
        self.require(Phase.SYNC, "to_rollout")
        if self._engine.weights_version < 0:
            raise RuntimeError("the engine has no complete weights; synchronise them first")
        self._go(Phase.ROLLOUT, Phase.SYNC)

    def to_train(self) -> None:
        """Hand the devices back to the trainer. Local.

        Before: ROLLOUT, SYNC or IDLE, the engine without requests. After: TRAIN, its cache freed.

        Raises:
            RuntimeError: Called in another state.
        """
        self._go(Phase.TRAIN, Phase.ROLLOUT, Phase.SYNC, Phase.IDLE)

    def require(self, phase: Phase, what: str) -> None:
        """Refuse work in a state in which its memory may be offloaded. Local.

        Raises:
            RuntimeError: The state is not ``phase``.
        """
        if self.state is not phase:
            raise RuntimeError(f"{what}: allowed in {phase.value} only, not in {self.state.value}")

    @contextmanager
    def onloaded(self, *owners: MemoryOwner) -> Iterator[None]:
        """Bring back, for the block, memory of owners that is offloaded even in TRAIN. Local.

        After an error of one group the others are still offloaded again.

        Raises:
            RuntimeError: Called outside TRAIN.
        """
        self.require(Phase.TRAIN, ", ".join(owners))
        groups = self._sharing.leaving(*owners)
        with ExitStack() as visits:
            for group in groups:
                visits.callback(self._finish_release, group)
                self._return(group)
            yield

    def _go(self, target: Phase, *sources: Phase) -> None:
        """Follow the chain to ``target``, one edge after another, from one of ``sources``."""
        if self.state not in sources:
            allowed = " or ".join(phase.value for phase in sources)
            raise RuntimeError(
                f"phase {target.value} is entered from {allowed} only, not from {self.state.value}"
            )
        edges = {
            (Phase.TRAIN, Phase.IDLE): self._train_to_idle,
            (Phase.IDLE, Phase.SYNC): self._idle_to_sync,
            (Phase.SYNC, Phase.ROLLOUT): self._sync_to_rollout,
            (Phase.ROLLOUT, Phase.SYNC): self._rollout_to_sync,
            (Phase.SYNC, Phase.IDLE): self._sync_to_idle,
            (Phase.IDLE, Phase.TRAIN): self._idle_to_train,
        }
        step = 1 if CHAIN.index(target) > CHAIN.index(self.state) else -1
        while self.state is not target:
            following = CHAIN[CHAIN.index(self.state) + step]
            try:
                perform(edges[self.state, following](), self._phase)
            except UndoFailed:
                self.state = Phase.BROKEN
                raise
            self.state = following
            self._sharing.at_border(following.value)

    def _train_to_idle(self) -> list[Action]:
        """Offload the memory that only the update needs, or begin to."""
        # Giving memory back waits for all queued copies, so that it comes before they begin.
        return [
            *self._offload(*(owner for owner in UPDATE_STATE if owner not in self._late)),
            *self._tidy("offload"),
            *(
                Action(f"copy {g.owner}", "offload", g.start_release, partial(self._return, g))
                for g in self._sharing.leaving(*self._late)
            ),
        ]

    def _idle_to_train(self) -> list[Action]:
        """Bring back the memory of the update; ``step`` waits for the copies, passes do not."""
        return self._onload(*UPDATE_STATE)

    def _idle_to_sync(self) -> list[Action]:
        """Make room for the update; allocate the engine's weights, whose content it writes."""
        frees = self._sharing.free_engine_weights
        if not frees and not self._sharing.leaving(*self._late):
            return []
        free, wake = self._engine.free_weights, self._engine.wake_weights
        return [
            Action("room for the update", "wake", self._room_for_update),
            *([Action("engine weights", "wake", wake, free)] if frees else []),
        ]

    def _sync_to_idle(self) -> list[Action]:
        """Free the engine's weights; undo allocates them without their content."""
        if not self._sharing.free_engine_weights:
            return []
        free, wake = self._engine.free_weights, self._engine.wake_weights
        return [Action("free engine weights", "sleep", free, wake), *self._tidy("sleep")]

    def _sync_to_rollout(self) -> list[Action]:
        """Offload parameters and what is late, then allocate the cache."""
        need = self._engine.cache_bytes
        return [
            *self._offload(*self._late, MemoryOwner.PARAMETERS),
            *self._tidy("offload"),
            Action("room for the cache", "wake", lambda: self._sharing.require_free(need)),
            Action("cache", "wake", self._engine.wake_cache, self._engine.free_cache),
        ]

    def _rollout_to_sync(self) -> list[Action]:
        """Free the cache, then bring back parameters."""
        return [
            Action("free cache", "sleep", self._engine.free_cache, self._engine.wake_cache),
            *self._tidy("sleep"),
            *self._onload(MemoryOwner.PARAMETERS, wait=True),
        ]

    @property
    def _late(self) -> list[MemoryOwner]:
        return [owner for owner in UPDATE_STATE if owner in self._sharing.late]

    def _room_for_update(self) -> None:
        """Let what is late leave now where the update needs its room; refuse what never fits.

        Staging and copies are upper bounds, which alone refuse nothing; the engine's weights do.
        """
        weights = self._engine.weight_bytes if self._sharing.free_engine_weights else 0
        late = [group for group in self._sharing.leaving(*self._late) if group.is_onloaded]
        if late:
            try:
                self._sharing.require_free(weights + self._sharing.sync_bytes())
                return
            except MemoryError:
                for group in late:
                    group.release()
                self._sharing.release_cached_memory()
        if weights:
            self._sharing.require_free(weights)

    def _offload(self, *owners: MemoryOwner) -> list[Action]:
        groups = self._sharing.leaving(*owners)
        return [
            Action(f"offload {g.owner}", "offload", g.release, partial(self._return, g))
            for g in groups
        ]

    def _tidy(self, phase: str) -> list[Action]:
        """Give freed memory back to the device, where the plan has a function for it."""
        release = self._sharing.release_cached_memory
        return [] if release is nothing else [Action("tidy", phase, release)]

    def _return(self, group: StorageGroup) -> None:
        """Restore a group and wait for its copies."""
        group.restore()
        self._sharing.wait_for_copies()

    def _onload(self, *owners: MemoryOwner, wait: bool = False) -> list[Action]:
        """Restore groups; with ``wait`` the next computation reads them and waits for copies."""
        groups = self._sharing.leaving(*owners)
        if not groups:
            return []
        need = sum(group.away_bytes for group in groups)
        room = Action("room for the trainer", "onload", lambda: self._sharing.require_free(need))
        back = [Action(f"onload {g.owner}", "onload", g.restore, g.release) for g in groups]
        arrival = Action("arrival", "onload", self._sharing.wait_for_copies)
        return [room, *back, *([arrival] if wait else [])]

    def _finish_release(self, group: StorageGroup) -> None:
        """Release a group, and try again after an error because no earlier state is restored."""
        try:
            group.release()
        except BaseException:
            try:
                group.release()
            except BaseException:
                self.state = Phase.BROKEN
                raise
            raise
