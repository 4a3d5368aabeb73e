"""Bytes of the gather of parameters and of the weight sync, beside the least of both together.

Of a rank, S are the elements that it has updated itself, T all that its trainer holds, and E all
that its engine needs. The gather brings T without S, the sync E without T. As S is a part of T,
both together are |T or E| - |S|, and this is also the least that can arrive at a rank that begins
with S and ends with T and E: one plan for both phases receives the same bytes. The same holds for
the ranks of a node taken together, so that it crosses no fewer bytes between nodes either.

What one plan could change is when bytes move: ranks that wait in one phase could work in it for the
other, and elements of T that E does not have could follow while the engine samples already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.algorithms.lora import NO_ADAPTERS
from mindspeed_rl.core.boxes import Box, missing_elements
from mindspeed_rl.handover.buffers import ParameterBuffer, buffers_of
from mindspeed_rl.weight_layouts.base import ShardLayout, Unit, element_bytes, locate
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

_GB = 1e9
# One plan for both phases is said to pay from this share of their bytes on.
_WORTH = 0.05


@dataclass(frozen=True, slots=True)
class RankHandover:
    """What arrives at one rank from the end of its optimizer step to new weights in its engine.

    Attributes:
        gather_bytes: Received by the gather of parameters, padding of buffers included.
        gather_floor_bytes: Of T without S; the mean over the ranks that share the optimizer state.
        sync_bytes: Received by the weight sync without a relay.
        sync_floor_bytes: Of E without T, in the smaller of both sides' element types.
        later_bytes: At most this much of the gather is not needed by the rank's engine.
    """

    gather_bytes: int
    gather_floor_bytes: float
    sync_bytes: int
    sync_floor_bytes: int
    later_bytes: int

    @property
    def both_bytes(self) -> int:
        """Bytes of gather and sync."""
        return self.gather_bytes + self.sync_bytes

    @property
    def floor_bytes(self) -> float:
        """The least that any plan for both could bring: |T or E| - |S|."""
        return self.gather_floor_bytes + self.sync_floor_bytes


@dataclass(frozen=True, slots=True)
class Handover:
    """The bytes of gather and sync of all ranks, in rank order."""

    ranks: tuple[RankHandover, ...]

    @property
    def saved_bytes(self) -> float:
        """Bytes of all ranks that one plan for both could leave out."""
        return sum(r.both_bytes - r.floor_bytes for r in self.ranks)

    @property
    def waiting_bytes(self) -> int:
        """What the wait for the end of the gather adds to the path of the busiest ranks."""
        apart = max(r.gather_bytes for r in self.ranks) + max(r.sync_bytes for r in self.ranks)
        return apart - max(r.both_bytes for r in self.ranks)

    @property
    def pays(self) -> bool:
        """Whether one plan for both could save a twentieth of the bytes or of the waiting."""
        apart = self.waiting_bytes + max(r.both_bytes for r in self.ranks)
        everything = sum(r.both_bytes for r in self.ranks)
        return self.saved_bytes > _WORTH * everything or self.waiting_bytes > _WORTH * apart

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of a table of the bytes in GB: what, at most of a rank, of all ranks."""
        yield ["received, GB", "at most of a rank", "of all ranks"]
        kinds: dict[str, list[float]] = {
            "gather of parameters": [r.gather_bytes for r in self.ranks],
            "weight sync": [r.sync_bytes for r in self.ranks],
            "both": [r.both_bytes for r in self.ranks],
            "floor of both together": [r.floor_bytes for r in self.ranks],
        }
        for name, sizes in kinds.items():
            yield [name, f"{max(sizes) / _GB:.3f}", f"{sum(sizes) / _GB:.3f}"]

    def verdict(self) -> Iterator[str]:
        """Yield sentences that say whether one plan for gather and sync would pay."""
        everything = sum(r.both_bytes for r in self.ranks)
        if not any(r.gather_bytes for r in self.ranks):
            yield "there is no gather: every rank updates all parameters that it holds"
            return
        most = max(r.both_bytes for r in self.ranks)
        yield (
            "a single plan for gather and weight sync, from the optimizer's shards to trainer and "
            f"engine, {'could' if self.pays else 'would not'} be worthwhile: it could leave out "
            f"{self.saved_bytes / everything:.2%} of the bytes (padding of buffers, types wider "
            "than needed) and shorten the path of the busiest ranks by at most "
            f"{self.waiting_bytes / (most + self.waiting_bytes):.2%} (waits at the end of the "
            "gather)"
        )
        later = max(r.later_bytes for r in self.ranks)
        yield (
            f"at most {later / _GB:.3f} GB of a rank's gather are not for its engine and could "
            "follow during rollouts, if its parameters stayed on the device"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON: for each the largest of a rank, and the sum."""
        found: dict[str, Any] = {"pays": self.pays, "waiting_bytes": self.waiting_bytes}
        for name in ("gather", "sync", "both", "floor", "later"):
            sizes = [round(getattr(rank, f"{name}_bytes")) for rank in self.ranks]
            found[name] = {"most_of_a_rank": max(sizes), "of_all_ranks": sum(sizes)}
        return found


def handover(
    source: MegatronLayout,
    target: ShardLayout,
    *,
    train_item: int,
    engine_item: int,
    distributed_optimizer: bool,
) -> Handover:
    """Count what arrives at every rank in the gather of parameters and in the sync. Local, pure.

    Args:
        source: Layout of the trainer, without adapters.
        target: Layout of the engine.
        train_item: Bytes of an element of the trainer's parameters.
        engine_item: Bytes of an element of the engine's parameters, which is the type on the wire.
        distributed_optimizer: Whether ``--use-distributed-optimizer`` is on.
    """
    parallel = source.parallel
    sync = _lacking(source, target, source, engine_item)
    sync_floor = _lacking(source, target, source, min(train_item, engine_item))
    unused = _lacking(target, source, source, train_item)
    known: dict[tuple[int, int], list[ParameterBuffer]] = {}
    found = []
    for rank in range(parallel.world):
        place = parallel.coords(rank)
        # Ranks of a stage differ by the padding of the vocabulary alone, which goes by their tp.
        if (place.pp, place.tp) not in known:
            known[place.pp, place.tp] = list(buffers_of(source, rank, NO_ADAPTERS))
        buffers = known[place.pp, place.tp] if distributed_optimizer else []
        gather = train_item * sum(b.gathered for b in buffers)
        least = train_item * sum(b.trained * (b.dp - 1) / b.dp for b in buffers)
        found.append(
            RankHandover(
                gather_bytes=gather,
                gather_floor_bytes=least,
                sync_bytes=sync[rank],
                sync_floor_bytes=sync_floor[rank],
                later_bytes=min(gather, unused[rank]),
            )
        )
    return Handover(tuple(found))


def _lacking(
    present: ShardLayout, wanted: ShardLayout, units: ShardLayout, item: int
) -> Counter[int]:
    """Count, by rank, the bytes that one layout has there and the other has not.

    Tensors that are placed alike are counted once.

    Args:
        present: Layout of what is there.
        wanted: Layout of what must be there.
        units: Layout that groups the tensors.
        item: Bytes of an element of tensors without a type of their own.
    """
    known: dict[tuple[Hashable, Hashable], Counter[int]] = {}
    times: Counter[tuple[Hashable, Hashable]] = Counter()
    for unit in units.units():
        first = unit.names[0]
        key = present.placement_key(first), wanted.placement_key(first)
        if key not in known:
            known[key] = _of_unit(unit, present, wanted, item)
        times[key] += 1
    found: Counter[int] = Counter()
    for key, sizes in known.items():
        for rank, size in sizes.items():
            found[rank] += size * times[key]
    return found


def _of_unit(unit: Unit, present: ShardLayout, wanted: ShardLayout, item: int) -> Counter[int]:
    lacking: Counter[int] = Counter()
    for name, count in _runs(unit, present, wanted):
        size = count * element_bytes(wanted.dtype_of(name), item)
        held = _boxes(present, name)
        for rank, boxes in _boxes(wanted, name).items():
            missing = missing_elements(tuple(boxes), tuple(held.get(rank, ())))
            if missing:
                lacking[rank] += missing * size
    return lacking


def _runs(unit: Unit, one: ShardLayout, other: ShardLayout) -> Iterator[tuple[str, int]]:
    """Yield one tensor of each run of experts that both layouts place alike, and their number."""
    for name in unit.names:
        expert, runs = locate(name)[2], (one.run_of(name), other.run_of(name))
        first = max(run.start for run in runs)
        if not unit.is_experts:
            yield name, 1
        elif expert == first:
            yield name, min(run.stop for run in runs) - first


def _boxes(layout: ShardLayout, name: str) -> dict[int, dict[Box, None]]:
    found: dict[int, dict[Box, None]] = {}
    for shard in layout.shards(name):
        for rank in shard.owner_ranks:
            found.setdefault(rank, {})[shard.piece.hf_box] = None
    return found
