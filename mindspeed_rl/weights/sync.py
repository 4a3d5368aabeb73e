"""The weight sync, which moves the trainer's weights into the engine and verifies them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.traffic import RankTraffic
from mindspeed_rl.weights.verify import WeightVerifier

# Reported when the checksums differ but every element equals that of its first source.
NOT_LOCATED = "every rank holds what the first source has: a checksum itself went wrong"


class WeightReceiver(Protocol):
    """The engine's side of a weight sync. Its methods are local to the rank."""

    @property
    def weights_version(self) -> int:
        """The trainer's update count of the weights; -1 before the first complete sync."""
        ...

    def weight_views(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters that a reshard writes, by the engine's names."""
        ...

    def load_tensor(self, hf_name: str, tensor: torch.Tensor) -> None:
        """Write one whole HF tensor through the engine's own loading code, within an update."""
        ...

    def begin_update(self) -> None:
        """Prepare for new weights: the engine refuses to generate until :meth:`finish_update`."""
        ...

    def finish_update(self, version: int) -> None:
        """Refresh derived state and caches, now that all weights are those of ``version``."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPath:
    """A path of the trainer's weights into the engine.

    Attributes:
        name: Name of the path in metrics.
        move: Function that writes all weights, given the trainer's parameters and the engine,
            between begin and finish of an update. Collective: the world.
        traffic: The bytes that this rank moves.
    """

    name: str
    move: Callable[[Mapping[str, torch.Tensor], WeightReceiver], None]
    traffic: RankTraffic


def reshard_path(resharder: Resharder) -> WeightPath:
    """Return the path on which a rank receives only the rectangles that its parameters need."""
    return WeightPath(
        "direct",
        lambda read, engine: resharder.run(read, engine.weight_views()),
        resharder.traffic,
    )


def stream_path(stream: TensorStream) -> WeightPath:
    """Return the path of whole tensors through the engine's own loading code, on every rank."""
    return WeightPath(
        "stream",
        lambda read, engine: stream.run(read, engine.load_tensor),
        stream.resharder.traffic,
    )


def sync_metrics(path: str, traffic: RankTraffic, seconds: float) -> MetricSet:
    """Return one rank's metrics of a sync. Local.

    Bytes are those of the busiest rank, the speed is the mean over ranks. The speed counts the
    busier direction, because links are full duplex.

    Args:
        path: Name of the path, whose share of what was written is 1.
        traffic: Bytes that this rank moves.
        seconds: Time that moving took on this rank, including the wait for its device.
    """
    received, sent, written = traffic.receive_bytes, traffic.send_bytes, traffic.written_bytes
    speed = [max(received, sent) / seconds / 1e9] if seconds > 0 else []
    return MetricSet(
        {
            "reshard/bytes_received": Max(float(received)),
            "reshard/bytes_sent": Max(float(sent)),
            "reshard/gb_per_s": Mean.of(speed),
            f"reshard/{path}_share": Mean(float(written), float(written)),
        }
    )


class WeightSync:
    """Moves one version of the weights into the engine and verifies it.

    Args:
        path: Path from trainer to engine.
        proof: Verifier that compares the bits of both sides.
        read: Function that returns the trainer's parameters.
        verify_interval: Number of syncs between verifications; 0: only the first sync is verified.
            The first sync after a failed one is always verified.
        synchronize: Function that waits for the device, so that the measured time of a sync is its
            own.

    Attributes:
        metrics: Bytes and speed of the latest sync on this rank.
    """

    def __init__(
        self,
        path: WeightPath,
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
        """Bring the engine to ``version``; no effect if it is there already. Collective: the world.

        Raises:
            RuntimeError: The weights differ. As after any other error, the engine refuses to
                generate until a whole update has succeeded.
        """
        if engine.weights_version == version:
            return
        number, self._num_syncs = self._num_syncs, 0
        engine.begin_update()
        read = self._read()
        self._synchronize()
        start = time.perf_counter()
        self._path.move(read, engine)
        self._synchronize()
        seconds = time.perf_counter() - start
        self.metrics = sync_metrics(self._path.name, self._path.traffic, seconds)
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
