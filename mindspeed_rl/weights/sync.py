"""The weight sync, which moves the trainer's weights into the engine and verifies them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet
from mindspeed_rl.parallel.small_collectives import gather_rows
from mindspeed_rl.weight_layouts.rollout import Slots
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.traffic import RankTraffic
from mindspeed_rl.weights.verify import WeightVerifier

# Reported when the checksums differ but every element equals that of its first source.
NOT_LOCATED = "every rank holds what the first source has: a checksum itself went wrong"
# Why all weights move after a sync of changes that left others.
WRONG_WEIGHTS = "the proof found wrong weights"


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

    def place_experts(self, layer_experts: Sequence[tuple[int, Slots]]) -> None:
        """Change which rank has which experts, before their weights are written in an update."""
        ...

    def finish_update(self, version: int) -> None:
        """Refresh derived state and caches, now that all weights are those of ``version``."""
        ...

    @property
    def keeps_bits(self) -> bool:
        """Whether an update begins with the bits that the latest one wrote."""
        ...


class ChangesOnly(Protocol):
    """What a path that moves only changes is told, and tells, of each sync."""

    @property
    def traffic(self) -> RankTraffic:
        """The bytes that this rank moved in the latest sync."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that later weights are compared with."""
        ...

    def agree(self, held: Sequence[int], keeps_bits: bool, why_all: str) -> bool:
        """Decide what moves whole, for the next move. Collective: the world.

        Args:
            held: Version of the weights that each rank's engine holds.
            keeps_bits: That of this rank's engine.
            why_all: Reason to move all words; empty: there is none. Equal on all ranks.

        Returns:
            Whether any pair of ranks moves only what changed; equal on all ranks.
        """
        ...

    def finished(self, version: int) -> None:
        """Note that all engines hold ``version``, as their proof said. Local."""
        ...

    def metrics(self) -> MetricSet:
        """Return the metrics of the latest sync on this rank."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPath:
    """A path of the trainer's weights into the engine.

    Attributes:
        name: Name of the path in metrics.
        move: Function that writes all weights, given the trainer's parameters and the engine,
            between begin and finish of an update. Collective: the world.
        traffic: The bytes that this rank moves if it moves all weights.
        changes: The side of the path that is told of each sync; ``None``: it moves all weights.
    """

    name: str
    move: Callable[[Mapping[str, torch.Tensor], WeightReceiver], None]
    traffic: RankTraffic
    changes: ChangesOnly | None = None


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


def versions_of_ranks(version: int) -> list[int]:
    """Gather the versions of the weights that all ranks' engines hold. Collective: the world."""
    versions: list[int] = gather_rows(torch.tensor([version])).flatten().tolist()
    return versions


@dataclass(slots=True)
class _Spent:
    """What one sync took on this rank: bytes of each move, seconds of moves and of proofs."""

    moves: list[RankTraffic] = field(default_factory=list)
    seconds: float = 0.0
    proof_seconds: float = 0.0

    def metrics(self, path: WeightPath) -> MetricSet:
        """Return the metrics of the sync; what a path of changes counts is of its last move."""
        traffic = replace(
            self.moves[-1],
            send_bytes=sum(move.send_bytes for move in self.moves),
            receive_bytes=sum(move.receive_bytes for move in self.moves),
        )
        found = sync_metrics(path.name, traffic, self.seconds)
        if path.changes:
            found = found.merge(path.changes.metrics())
        return found.merge({"reshard/proof_s": Max(self.proof_seconds)})


class WeightSync:
    """Moves one version of the weights into the engine and verifies it.

    Where the proof finds wrong tensors after a sync of changes (a delta was lost, or an engine's
    weights were written by others), all weights move at once and are proven in full.

    A sync is proven in full when it is the first, when it follows :meth:`weights_replaced`,
    :meth:`retarget`, a sync that failed or engines that hold what they should not, and at the given
    interval. All others are proven by a sample of rows.

    Args:
        path: Path from trainer to engine.
        proof: Verifier that compares the bits of both sides.
        read: Function that returns the trainer's parameters.
        verify_interval: Number of syncs from one full proof to the next; 0: only where it must be.
        gather_versions: Function that returns the numbers that all ranks give, in rank order.
            Collective: the world.
        log: Function that shows a line once, called on all ranks.
        synchronize: Function that waits for the device, so that the measured time of a sync is its
            own.

    Attributes:
        metrics: Bytes, speed and seconds of the proof of the latest sync on this rank.
    """

    def __init__(
        self,
        path: WeightPath,
        proof: WeightVerifier,
        read: Callable[[], Mapping[str, torch.Tensor]],
        verify_interval: int,
        *,
        gather_versions: Callable[[int], Sequence[int]],
        log: Callable[[str], None],
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.metrics = MetricSet()
        self._synchronize = synchronize
        self._path = path
        self._proof = proof
        self._read = read
        self._verify_interval = verify_interval
        self._gather_versions = gather_versions
        self._log = log
        self._num_syncs = 0  # since the last reason for a full proof
        self._reason = "this is the first sync"  # for it; empty after a sync that succeeded
        self._sample = -1  # number of the next; the first one's is the version before it
        self._left_version = -1  # of the engines after the latest sync
        self._moved: Sequence[tuple[int, Slots]] = ()

    def retarget(
        self,
        path: WeightPath,
        proof: WeightVerifier,
        layer_experts: Sequence[tuple[int, Slots]],
    ) -> None:
        """Let the next sync, which is proven in full, and all later ones place experts anew. Local.

        Args:
            path: Path to the engine with its experts in their new places.
            proof: Verifier of that engine.
            layer_experts: Layer and the expert in each slot, for all layers with experts.
        """
        self._path, self._proof, self._moved = path, proof, tuple(layer_experts)
        self._num_syncs, self._reason = 0, "experts have new places"

    def weights_replaced(self) -> None:
        """Move and prove all weights at the next sync, as the trainer has loaded others. Local.

        Call it on all ranks.
        """
        self._num_syncs, self._reason = 0, "the trainer has loaded weights"

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that the path keeps of what it sent."""
        return self._path.changes.kept_bytes if self._path.changes else 0

    def run(self, engine: WeightReceiver, version: int) -> None:
        """Bring the engine to ``version``, unless a sync left it there. Collective: the world.

        Raises:
            RuntimeError: The weights differ after all of them moved. As after any other error, the
                engine refuses to generate until a whole update has succeeded.
        """
        held = self._gather_versions(engine.weights_version)
        if self._num_syncs and all(of_rank == version == self._left_version for of_rank in held):
            return
        number, self._num_syncs = self._num_syncs, 0
        reason, self._reason = self._reason, "the latest sync failed"
        if surprise := unexpected_versions(held, self._left_version):
            self._log(surprise)
            number, reason = 0, "engines do not hold what the latest sync left"
        elif set(held) == {-1}:
            reason = reason or "the engines have freed their weights"
        self._left_version = -1
        changes = self._path.changes
        only_changes = bool(changes and changes.agree(held, engine.keeps_bits, reason))
        engine.begin_update()
        if self._moved:
            engine.place_experts(self._moved)
        read = self._read()
        spent = _Spent()
        self._move(read, engine, spent)
        interval = self._verify_interval
        in_full = number == 0 or (interval > 0 and number % interval == 0)
        sample = None if in_full else self._sample
        wrong = self._differing(read, engine, sample, spent)
        if wrong and changes and only_changes:
            self._log(
                f"warning: reshard: {len(wrong)} tensors ({', '.join(wrong[:3])}"
                f"{', ...' if len(wrong) > 3 else ''}) differ after a sync of changes; all weights "
                "follow"
            )
            changes.agree(held, engine.keeps_bits, WRONG_WEIGHTS)
            self._move(read, engine, spent)
            number, in_full, sample = 0, True, None
            wrong = self._differing(read, engine, sample, spent)
        self._refuse(wrong, read, engine, sample)
        self.metrics = spent.metrics(self._path)
        engine.finish_update(version)
        if changes:
            changes.finished(version)
        self._reason = ""
        self._sample = version if self._sample < 0 else self._sample + (not in_full)
        self._num_syncs, self._left_version, self._moved = number + 1, version, ()

    def _move(
        self, read: Mapping[str, torch.Tensor], engine: WeightReceiver, spent: _Spent
    ) -> None:
        """Move the weights and add what it took. Collective: the world."""
        self._synchronize()
        start = time.perf_counter()
        self._path.move(read, engine)
        self._synchronize()
        changes = self._path.changes
        spent.seconds += time.perf_counter() - start
        spent.moves.append(changes.traffic if changes else self._path.traffic)

    def _differing(
        self,
        read: Mapping[str, torch.Tensor],
        engine: WeightReceiver,
        sample: int | None,
        spent: _Spent,
    ) -> list[str]:
        """Return the tensors that differ, the same on all ranks. Collective: the world."""
        start = time.perf_counter()
        wrong = self._proof.differing_tensors(read, engine.weight_views(), sample=sample)
        spent.proof_seconds += time.perf_counter() - start
        return wrong

    def _refuse(
        self,
        wrong: Sequence[str],
        read: Mapping[str, torch.Tensor],
        engine: WeightReceiver,
        sample: int | None,
    ) -> None:
        """Raise where tensors differ, with the first element. Collective: the world."""
        if wrong:
            where = self._proof.first_difference(wrong[0], read, engine.weight_views())
            what = "engine weights" if sample is None else "sampled rows of engine weights"
            raise RuntimeError(
                f"reshard: {what} differ from the trainer's in {len(wrong)} tensors: "
                f"{', '.join(wrong[:5])}; {where or NOT_LOCATED}"
            )


def unexpected_versions(held: Sequence[int], left: int) -> str:
    """Return a line about engines that do not hold what the latest sync left; empty: all do.

    Engines have that version, or all have freed their weights (-1). Anything else is an engine that
    restarted alone or got its weights from elsewhere.

    Args:
        held: Version of the weights on each rank.
        left: Version after the latest sync; -1: there was none, or it failed.
    """
    if set(held) in ({-1}, {left}):
        return ""
    odd = [rank for rank, version in enumerate(held) if version != left]
    found = ", ".join(_version_text(held[rank]) for rank in odd[:5])
    ranks = ", ".join(map(str, odd[:5])) + (", ..." if len(odd) > 5 else "")
    return (
        f"warning: reshard: ranks {ranks} ({len(odd)} of {len(held)}) hold weights of version "
        f"{found}, where the latest sync left {_version_text(left)}: an engine restarted or was "
        "written by others; all its weights are moved and proven in full"
    )


def _version_text(version: int) -> str:
    return str(version) if version >= 0 else "none"
