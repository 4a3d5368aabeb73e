"""The trainer's weights into the engine: the ways, and the proof that they arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.weights.checksums import WeightVerifier
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.sync_metrics import SyncTraffic, sync_metrics

# The checksums differ, and yet the engine holds what the first source of every rectangle holds.
NOT_LOCATED = "every rank holds what the first source has: a checksum itself went wrong"


class WeightReceiver(Protocol):
    """The side of an engine that weights go to. All of it is local to the rank."""

    @property
    def weights_version(self) -> int:
        """The trainer's update count of the weights; -1 before the first complete sync."""
        ...

    def weight_views(self) -> Mapping[str, torch.Tensor]:
        """The parameters that a reshard writes, by the engine's names."""
        ...

    def load_tensor(self, hf_name: str, tensor: torch.Tensor) -> None:
        """Write one whole HF tensor through the engine's own loading code, within an update."""
        ...

    def begin_update(self) -> None:
        """Weights are about to change: generating is refused until :meth:`finish_update`."""
        ...

    def finish_update(self, version: int) -> None:
        """All weights are those of ``version``: derived state and caches are refreshed."""
        ...


class WeightTransfer(Protocol):
    """A way of the trainer's weights into the engine."""

    @property
    def name(self) -> str:
        """In metrics."""
        ...

    def move(self, read: Mapping[str, torch.Tensor], engine: WeightReceiver) -> SyncTraffic:
        """Write all weights, between begin and finish of an update. Collective: the world."""
        ...


@dataclass(frozen=True, slots=True)
class ReshardTransfer:
    """Rectangles straight into the engine's live parameters."""

    resharder: Resharder
    name: str = "direct"

    def move(self, read: Mapping[str, torch.Tensor], engine: WeightReceiver) -> SyncTraffic:
        """Each rank receives what it needs, and nothing else."""
        return self.resharder.run(read, engine.weight_views())


@dataclass(frozen=True, slots=True)
class StreamTransfer:
    """Whole tensors through the engine's own loading code."""

    stream: TensorStream
    name: str = "stream"

    def move(self, read: Mapping[str, torch.Tensor], engine: WeightReceiver) -> SyncTraffic:
        """Every rank receives every tensor, one after another."""
        return self.stream.run(read, engine.load_tensor)


class WeightSync:
    """Moves a version of the weights and proves it.

    Args:
        path: from trainer to engine.
        proof: compares the bits of both sides.
        read: the trainer's parameters.
        verify_interval: syncs between proofs; 0: the first only. The first sync after one that
            failed is proven in any case.
        synchronize: waits for the device, so that the time of a sync is its own.

    Attributes:
        metrics: bytes and speed of the latest sync on this rank.
    """

    def __init__(
        self,
        path: WeightTransfer,
        proof: WeightVerifier,
        read: Callable[[], Mapping[str, torch.Tensor]],
        verify_interval: int,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.metrics = MetricSet()
        self._synchronize = synchronize
        self._path = path
        self._proof = proof
        self._read = read
        self._verify_interval = verify_interval
        self._num_syncs = 0

    def run(self, engine: WeightReceiver, version: int) -> None:
        """Bring the engine to ``version``; no effect when it is there. Collective: the world.

        Raises:
            RuntimeError: the proof found a difference. As after any other error, the engine refuses
                to generate until a whole update has succeeded.
        """
        if engine.weights_version == version:
            return
        number, self._num_syncs = self._num_syncs, 0
        engine.begin_update()
        read = self._read()
        self._synchronize()
        start = time.perf_counter()
        traffic = self._path.move(read, engine)
        self._synchronize()
        self.metrics = sync_metrics({self._path.name: traffic}, time.perf_counter() - start)
        if number == 0 or (self._verify_interval and number % self._verify_interval == 0):
            self._prove(read, engine.weight_views())
        engine.finish_update(version)
        self._num_syncs = number + 1

    def _prove(self, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]) -> None:
        wrong = self._proof.differing_tensors(read, write)
        if wrong:
            where = self._proof.first_difference(wrong[0], read, write)
            raise RuntimeError(
                f"reshard: engine weights differ from the trainer's in {len(wrong)} tensors: "
                f"{', '.join(wrong[:5])}; {where or NOT_LOCATED}"
            )
