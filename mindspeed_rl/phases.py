"""The switch between training and rollout on shared devices: one state machine.

States and legal moves::

    TRAIN --to_rollout--> ROLLOUT --to_train--> TRAIN

Process of ``to_rollout``: wake the engine's weights, reshard the trainer's weights into them,
prove that the bits are equal, refresh derived state, wake the key/value cache. ``to_train`` gives
the cache back. A move that fails leaves the machine BROKEN: no later call works on half-synced
weights.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_rl.resharding.checksums import WeightProof
from mindspeed_rl.resharding.executor import Resharder
from mindspeed_rl.resharding.stream import TensorStream
from mindspeed_rl.rollout.engine import InferenceEngine

# The checksums differ, and yet the engine holds what the first source of every rectangle holds.
NOT_LOCATED = "every rank holds what the first source has: a checksum itself went wrong"


class Phase(enum.Enum):
    """What the devices are used for."""

    TRAIN = "train"
    SYNC = "sync"
    ROLLOUT = "rollout"
    BROKEN = "broken"


class WeightPath(Protocol):
    """A way of the trainer's weights into the engine."""

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Write all weights, between begin and finish of an update. Collective: the world."""
        ...


@dataclass(frozen=True, slots=True)
class DirectPath:
    """Rectangles straight into the engine's live parameters."""

    resharder: Resharder

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Each rank receives what it needs, and nothing else."""
        self.resharder.run(read, engine.weight_views())


@dataclass(frozen=True, slots=True)
class StreamPath:
    """Whole tensors through the engine's own loading code."""

    stream: TensorStream

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Every rank receives every tensor, one after another."""
        self.stream.run(read, engine.load_tensor)


@dataclass(frozen=True, slots=True)
class WeightSync:
    """Everything that a weight update needs besides the engine.

    Attributes:
        path: from trainer to engine.
        proof: compares the bits of both sides.
        read: the trainer's parameters.
        verify_interval: syncs between proofs; 0: the first only.
    """

    path: WeightPath
    proof: WeightProof
    read: Callable[[], Mapping[str, torch.Tensor]]
    verify_interval: int


class Phases:
    """Owns the state of the shared devices.

    Args:
        engine: the inference engine of this rank.
        sync: how weights get into it.
        phase: context manager that names a phase for timers and the watchdog.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        sync: WeightSync,
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._sync = sync
        self._phase = phase
        self._num_syncs = 0
        self.state = Phase.TRAIN
        engine.sleep()

    def to_rollout(self, version: int) -> None:
        """Hand the devices to the engine with weights of ``version``. Collective: the world.

        Before: engine asleep. After: engine awake, its weights bit-equal to the trainer's.

        Raises:
            RuntimeError: called outside TRAIN, or the proof found a difference.
        """
        with self._move(Phase.TRAIN, Phase.ROLLOUT):
            self.state = Phase.SYNC
            with self._phase("reshard"):
                self._engine.wake(["weights"])
                if self._engine.weights_version != version:
                    self._update_weights(version)
            with self._phase("wake"):
                self._engine.wake(["kv_cache"])

    def to_train(self) -> None:
        """Hand the devices back to the trainer. Local.

        Before: engine idle. After: its cache is freed.
        """
        with self._move(Phase.ROLLOUT, Phase.TRAIN), self._phase("sleep"):
            self._engine.sleep()

    @contextmanager
    def _move(self, before: Phase, after: Phase) -> Iterator[None]:
        if self.state is not before:
            raise RuntimeError(f"phase {after.value} is entered from {before.value} only, "
                               f"not from {self.state.value}")  # fmt: skip
        try:
            yield
        except BaseException:
            self.state = Phase.BROKEN
            raise
        self.state = after

    def _update_weights(self, version: int) -> None:
        sync, engine = self._sync, self._engine
        engine.begin_update()
        read, write = sync.read(), engine.weight_views()
        sync.path.move(read, engine)
        interval = sync.verify_interval
        if self._num_syncs == 0 or (interval and self._num_syncs % interval == 0):
            wrong = sync.proof.differing_tensors(read, write)
            if wrong:
                where = sync.proof.first_difference(wrong[0], read, write)
                raise RuntimeError(
                    f"reshard: engine weights differ from the trainer's in {len(wrong)} tensors: "
                    f"{', '.join(wrong[:5])}; {where or NOT_LOCATED}"
                )
        engine.finish_update(version)
        self._num_syncs += 1
