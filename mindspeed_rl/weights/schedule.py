"""Rounds of a reshard: which slices of which tensors travel together, under a byte budget.

The schedule is a pure function of the two layouts, so all ranks agree without communication.
Tensors queue up by pipeline stage of the source, and every round takes the next slice of every
queue, in proportion to the length of the queue. All stages thus send from the first round to the
last, and the sum over rounds of the busiest rank's bytes stays close to the bytes that the busiest
rank moves in all. Where that makes many small messages, rounds form groups whose pairs of ranks
take turns (:mod:`~mindspeed_rl.weights.turns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, zip_longest
from math import ceil, inf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weight_layouts.base import ShardLayout, Unit, element_bytes, layer_name, locate
from mindspeed_rl.weights.planner import Overlaps
from mindspeed_rl.weights.sources import SourceAssignment
from mindspeed_rl.weights.turns import ALL_AT_ONCE, Demand, RankTurns, turn_of, turns_of_kinds

_MAX_PARTS = 1 << 16

# From this size on, a rectangle may be a message of its own, while a rank has so few messages.
ALONE_BYTES, MOST_ALONE = 256 << 10, 1000

Loads = NDArray[np.float64]
Rectangles = tuple[tuple[float, int], ...]
# Units whose slices travel in the same rounds.
Batch = tuple[Unit, ...]


class Slot(NamedTuple):
    """A slice of a tensor's rectangles, which travels in the rounds of a group.

    Attributes:
        round: First round of the group.
        part: Number of the slice.
        parts: Number of slices.
        turns: Turns of pairs of ranks in the group.
        stage: Pipeline stage of the tensor.
    """

    round: int
    part: int
    parts: int
    turns: RankTurns = ALL_AT_ONCE
    stage: int = 0

    def round_of(self, src: int, dst: int) -> int:
        """Return the round in which the slice travels between two ranks."""
        turns = self.turns
        return self.round + turn_of(turns, self.stage, src, dst) if turns.count > 1 else self.round

    @property
    def last_round(self) -> int:
        """The round after which all ranks have the slice."""
        return self.round + self.turns.count - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds in which all tensors travel.

    Attributes:
        slots: Slots in order, by key of a unit or by name of a tensor; see :meth:`slots_of`.
        completed: For each round, the tensors that are complete after it.
        dtypes: For each round, the declared element type of its tensors; empty: that of the model.
        alone_bytes: Bytes from which on a rectangle may be a message of its own, where a transport
            can do that.
    """

    slots: Mapping[str, tuple[Slot, ...]]
    completed: tuple[tuple[str, ...], ...]
    dtypes: tuple[str, ...]
    alone_bytes: float

    def slots_of(self, source: ShardLayout, hf_name: str) -> tuple[Slot, ...]:
        """Return the slots in which the slices of a tensor travel."""
        return self.slots.get(hf_name) or self.slots[source.unit_of(hf_name)]

    @property
    def num_rounds(self) -> int:
        return len(self.completed)


@dataclass(frozen=True, eq=False, slots=True)
class _Cost:
    """The bytes that ranks move for one unit.

    Attributes:
        loads: [hops x turns, world] bytes that each rank sends plus receives if the whole unit
            travels in one group of rounds.
        whole: [hops, world] the same of all turns together.
        most: The largest of ``loads``.
        rectangles: Sizes of rectangles in bytes, and how many of each a rank receives at most.
        extents: Sizes of the unit's rectangles along the sliced dimension.
    """

    loads: Loads
    whole: Loads
    most: float
    rectangles: Rectangles
    extents: frozenset[int]

    @property
    def narrowest(self) -> int:
        """The least of the extents, which bounds the number of slices."""
        return min(self.extents, default=_MAX_PARTS)


class _Item(NamedTuple):
    """A slice of a unit, which travels in one round."""

    unit: Unit
    cost: _Cost
    part: int
    parts: int

    @property
    def loads(self) -> Loads:
        """Bound of the slice: of n rows in k parts it has at most n / k, rounded up."""
        return _loads(self.cost, self.parts) if self.parts > 1 else self.cost.loads


@lru_cache(maxsize=256)
def _loads(cost: _Cost, parts: int) -> Loads:
    return cost.loads * max(-(-n // parts) / n for n in cost.extents)


@without_collection()
def plan_schedule(
    source: ShardLayout,
    target: ShardLayout,
    *,
    bucket_bytes: int,
    item_bytes: int,
    ranks_per_node: int,
    relay: bool = False,
    overlaps: Overlaps | None = None,
) -> Schedule:
    """Make the rounds of a reshard, the same on every rank. A round has one element type.

    Args:
        source: Layout that is read.
        target: Layout that is written.
        bucket_bytes: Bound of send plus receive staging of one round on one rank.
        item_bytes: Bytes of one element on the wire, for tensors that declare no type.
        ranks_per_node: Number of ranks per node, the same as in the plans.
        relay: Whether rectangles are forwarded within nodes, the same as in the plans.
        overlaps: Those of the same layouts, where they are used elsewhere as well.

    Raises:
        UsageError: The budget is too small for the narrowest slices.
    """
    if bucket_bytes < 1:
        raise UsageError(f"--reshard-bucket-mb gives {bucket_bytes} bytes; must be positive")
    overlaps = overlaps or Overlaps(source, target, ranks_per_node, relay)
    costs = _Costs(overlaps, item_bytes)
    units = sorted(source.units(), key=lambda unit: unit.layer)
    if not relay and not target.fills_tensor_by_tensor:
        costs.choose_turns(units, bucket_bytes)
    stages_of: dict[tuple[str, RankTurns], dict[int, list[Batch]]] = {}
    for unit in units:
        stages = stages_of.setdefault((source.dtype_of(unit.names[0]), costs.turns_of(unit)), {})
        batches = _tensors(source, unit, bucket_bytes // (2 * item_bytes))
        stages.setdefault(unit.stage, []).extend(
            batches if target.fills_tensor_by_tensor else [(unit,)]
        )
    slots: dict[str, list[Slot]] = {}
    completed: list[tuple[str, ...]] = []
    dtypes: list[str] = []
    sent: list[_Item] = []
    for (dtype, turns), stages in sorted(stages_of.items(), key=lambda entry: repr(entry[0])):
        for items in _fill(list(stages.values()), costs, turns, bucket_bytes):
            for item in items:
                slot = Slot(len(completed), item.part, item.parts, turns, item.unit.stage)
                slots.setdefault(item.unit.key, []).append(slot)
            whole = (i.unit.names for i in items if i.part == i.parts - 1)
            completed += [()] * (turns.count - 1)
            completed.append(tuple(name for names in whole for name in names))
            dtypes += [dtype] * turns.count
            sent += items
    return Schedule(
        {key: tuple(several) for key, several in slots.items()},
        tuple(completed),
        tuple(dtypes),
        _alone_bytes(sent, MOST_ALONE - costs.num_messages),
    )


def _alone_bytes(items: Iterable[_Item], most: float) -> float:
    """Return the least size of which no rank receives more than ``most`` rectangles, about."""
    counts: Counter[float] = Counter()
    for item in items:
        for size, count in item.cost.rectangles if not item.part else ():
            counts[size / item.parts] += count * item.parts
    total, least = 0, inf
    for size in sorted(counts, reverse=True):
        total += counts[size]
        if size < ALONE_BYTES or total > most:
            break
        least = size
    # Slices of one rectangle differ by a row.
    return max(float(ALONE_BYTES), 0.9 * least)


def _tensors(source: ShardLayout, unit: Unit, elements: int) -> Iterator[Batch]:
    """Yield every tensor as a unit of its own, in batches over all of their owner ranks.

    Otherwise the experts of one rank would come one after another while the other ranks wait. A
    batch has one tensor or at most ``elements``, because its tensors stay incomplete until it ends.
    """
    width = max(1, elements // prod(source.shape_of(unit.names[0])))
    of_owners: dict[range, list[Unit]] = {}
    for name in unit.names:
        owner_ranks = source.shards(name)[0].owner_ranks
        of_owners.setdefault(owner_ranks, []).append(Unit(name, unit.stage, unit.layer, (name,)))
    for column in zip_longest(*of_owners.values()):
        present = tuple(tensor for tensor in column if tensor is not None)
        for start in range(0, len(present), width):
            yield present[start : start + width]


class _Costs:
    """The costs of units, computed once for units whose ranks exchange the same."""

    def __init__(self, overlaps: Overlaps, item_bytes: int) -> None:
        self._overlaps, self._item_bytes = overlaps, item_bytes
        self._source, self._target = overlaps.source, overlaps.target
        self._num_hops = 2 if overlaps.relay else 1
        self._measured: dict[Hashable, _Measured] = {}
        self._known: dict[Hashable, _Cost] = {}
        self._turns: Mapping[bool, RankTurns] = {}
        self.num_messages = 0.0

    def choose_turns(self, units: Sequence[Unit], bucket_bytes: int) -> None:
        """Choose the turns of experts and of all other tensors."""
        alike: dict[Hashable, list[Unit]] = {}
        for unit in units:
            alike.setdefault(self._key(unit), []).append(unit)
        demands: dict[bool, list[tuple[Demand, int]]] = {}
        for key, several in alike.items():
            measured = self._measured[key] = self._measure(several[0])
            entry = measured.demand, len(several)
            demands.setdefault(several[0].is_experts, []).append(entry)
        self._turns, self.num_messages = turns_of_kinds(demands, bucket_bytes)

    def turns_of(self, unit: Unit) -> RankTurns:
        """Return the turns of a unit."""
        return self._turns.get(unit.is_experts, ALL_AT_ONCE)

    def of(self, unit: Unit) -> _Cost:
        """Return the cost of a unit."""
        key = self._key(unit)
        measured = self._measured.get(key)
        if measured is None:
            measured = self._measured[key] = self._measure(unit)
        if measured.rotates:
            key = unit.key
        if key not in self._known:
            measured = self._measure(unit) if measured.rotates else measured
            loads = measured.demand.loads(self.turns_of(unit), self._num_hops)
            whole: Loads = loads.reshape(self._num_hops, -1, loads.shape[1]).sum(axis=1)
            most = float(loads.max(initial=0.0))
            self._known[key] = _Cost(loads, whole, most, measured.rectangles, measured.extents)
        return self._known[key]

    def _key(self, unit: Unit) -> Hashable:
        kind, experts = _kind_of(unit)
        return self._overlaps.sides(kind), experts

    def _measure(self, unit: Unit) -> _Measured:
        item_bytes = element_bytes(self._source.dtype_of(unit.names[0]), self._item_bytes)
        found = [(run, self._overlaps.of(run)) for run in self._overlaps.runs(*_kind_of(unit))]
        several = [overlap.arrivals for _, overlap in found]
        joined = SourceAssignment.joined([overlap.assigned for _, overlap in found])
        sizes = [
            overlap.arrivals.elements * (item_bytes * run.num_tensors) for run, overlap in found
        ]
        travels = joined.hop > 0
        size = np.concatenate(sizes).astype(np.float64)[joined.slice[travels]]
        hop, src, dst = (column[travels] for column in joined[1:4])
        widths = frozenset({1}).union(*(arrivals.widths for arrivals in several))
        demand = Demand(unit.stage, hop - 1, src, dst, size, widths)
        extents: frozenset[int] = frozenset().union(*(arrivals.extents for arrivals in several))
        return _Measured(demand, _rectangles(demand), extents, not joined.is_balanced)


def _kind_of(unit: Unit) -> tuple[str, range]:
    """Return the name of a unit's tensors, with ``{e}`` for the expert, and the experts."""
    pattern, layer, expert = locate(unit.names[0])
    return layer_name(pattern, layer), range(expert, expert + len(unit.names))


def _rectangles(demand: Demand) -> Rectangles:
    """Return sizes of large rectangles, and how many of each a rank receives at most."""
    large = (size for size in np.unique(demand.size).tolist() if size >= ALONE_BYTES)
    return tuple((size, int(np.bincount(demand.dst[demand.size == size]).max())) for size in large)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What ranks exchange of a unit.

    Attributes:
        demand: What they send each other.
        rectangles: As in :class:`_Cost`.
        extents: As in :class:`_Cost`.
        rotates: Whether other layers have other senders.
    """

    demand: Demand
    rectangles: Rectangles
    extents: frozenset[int]
    rotates: bool


def _fill(
    stages: list[list[Batch]], costs: _Costs, turns: RankTurns, bucket_bytes: int
) -> list[list[_Item]]:
    """Return the slices of units that each round sends."""
    _check_budget(stages, costs, bucket_bytes)
    # With turns a rank deals with few stages at a time, so larger slices are even enough.
    at_once = max(2, 2 * len(stages) // turns.count)
    quantum = bucket_bytes / (4 * min(len(stages), at_once))
    queues = [[i for batch in stage for i in _slices(batch, costs, quantum)] for stage in stages]
    world = max(i.cost.loads.shape[1] for queue in queues for i in queue)
    rows = max(i.cost.loads.shape[0] for queue in queues for i in queue)
    total = _total([item for queue in queues for item in queue], rows, world)
    least = max(1, int(np.ceil(total.max() / bucket_bytes)))
    progress = [_progress(queue, world) for queue in queues]
    rounds, _ = _fitting(queues, progress, least, (rows, world), bucket_bytes)
    if rounds is None:
        # Items that load other ranks or hops than the busiest are no progress, and share a round.
        progress = [_progress_of_items(queue) for queue in queues]
        rounds, largest = _fitting(queues, progress, least, (rows, world), bucket_bytes)
        if rounds is None:
            raise _too_small(bucket_bytes, largest)
    return rounds


def _fitting(
    queues: list[list[_Item]],
    progress: list[Loads],
    least: int,
    shape: tuple[int, int],
    bucket_bytes: int,
) -> tuple[list[list[_Item]] | None, float]:
    """Return at least ``least`` rounds within the bucket, or ``None``, and the largest round."""

    def size_of(items: list[_Item]) -> float:
        return float(_total(items, *shape).max(initial=0.0))

    most, count = max(len(queue) for queue in queues), least
    while True:
        sized = [(items, size_of(items)) for items in _spread(queues, progress, min(count, most))]
        if sum(size > bucket_bytes for _, size in sized) <= _FEW * count:
            sized = [
                pair
                for items, size in sized
                for pair in (
                    [(items, size)]
                    if size <= bucket_bytes
                    else [(half, size_of(half)) for half in _halves(items) if half]
                )
            ]
            if max(size for _, size in sized) <= bucket_bytes:
                return [items for items, _ in sized], max(size for _, size in sized)
        if count >= most:
            return None, max(size for _, size in sized)
        count = min(most, max(count + 1, int(count * 1.04)))


# The share of overfull rounds that is split in place of making all rounds smaller.
_FEW = 0.1


def _halves(items: list[_Item]) -> list[list[_Item]]:
    """Split a round: the first and the second half of what each stage sends, in order."""
    halves: list[list[_Item]] = [[], []]
    of_stages: dict[int, list[_Item]] = {}
    for item in items:
        of_stages.setdefault(item.unit.stage, []).append(item)
    for several in of_stages.values():
        middle = (len(several) + 1) // 2
        halves[0] += several[:middle]
        halves[1] += several[middle:]
    return halves


def _check_budget(stages: list[list[Batch]], costs: _Costs, bucket_bytes: int) -> None:
    """Refuse a budget that the narrowest slice of some unit exceeds, before any slice is made."""
    narrowest = [
        max(_Item(u, cost, 0, cost.narrowest).loads.max(initial=0.0) for u, cost in priced)
        for priced in ([(u, costs.of(u)) for batch in stage for u in batch] for stage in stages)
    ]
    if max(narrowest) > bucket_bytes:
        raise _too_small(bucket_bytes, sum(narrowest))


def _too_small(bucket_bytes: int, needed: float) -> UsageError:
    return UsageError(
        f"--reshard-bucket-mb gives {bucket_bytes} bytes for one round; the smallest slices of "
        f"this model and these layouts need {int(needed)}: raise it to at least "
        f"{2 * needed / 2**20:.3g}"
    )


def _slices(batch: Batch, costs: _Costs, quantum: float) -> Iterator[_Item]:
    """Yield the first slices of all units of a batch, then the second ones, and so on."""
    priced = [(unit, costs.of(unit)) for unit in batch]
    counts = [max(1, min(ceil(cost.most / quantum), cost.narrowest)) for _, cost in priced]
    for part in range(max(counts)):
        for (unit, cost), parts in zip(priced, counts, strict=True):
            if part < parts:
                yield _Item(unit, cost, part, parts)


def _total(items: list[_Item], rows: int, world: int) -> Loads:
    """Return the load of every rank in its busiest exchange of a group of rounds: [world]."""
    amounts: dict[tuple[int, int], tuple[_Item, int]] = {}
    for item in items:
        key = (id(item.cost), item.parts)
        amounts[key] = (item, amounts.get(key, (item, 0))[1] + 1)
    table = np.zeros((rows, world))
    for item, times in amounts.values():
        table[:, : item.cost.loads.shape[1]] += item.loads * times
    result: Loads = table.max(axis=0)
    return result


def _spread(queues: list[list[_Item]], progress: list[Loads], count: int) -> list[list[_Item]]:
    """Spread every queue over ``count`` rounds, in proportion to its progress."""
    rounds: list[list[_Item]] = [[] for _ in range(count)]
    for queue, middles in zip(queues, progress, strict=True):
        for item, number in zip(queue, (middles * count).astype(int).tolist(), strict=True):
            rounds[min(count - 1, number)].append(item)
    return rounds


def _progress(queue: list[_Item], world: int) -> Loads:
    """Return how far the busiest rank's load has got by the middle of each item: [items], 0 to 1.

    In large worlds only every k-th rank is considered, with k odd so that all positions in a node
    occur.
    """
    some = slice(None, None, world // 512 | 1)
    load = np.zeros((2, len(range(world)[some])))
    reached = [np.zeros(1)]
    for _, alike in groupby(queue, lambda item: (id(item.cost), item.parts)):
        items = list(alike)
        adding = items[0].cost.whole[:, some]
        hops, ranks = adding.shape
        parts = np.arange(1, len(items) + 1) / items[0].parts
        rising = load[:hops, :ranks] + parts[:, None, None] * adding
        load[:hops, :ranks] = rising[-1]
        reached.append(np.maximum(rising.max(axis=(1, 2)), reached[-1][-1]))
    ends = np.concatenate(reached)
    middles: Loads = (ends[1:] + ends[:-1]) / max(2 * ends[-1], 1e-300)
    return middles


def _progress_of_items(queue: list[_Item]) -> Loads:
    """Return how much of the sum of all items' own loads comes before the middle of each item."""
    ends = np.cumsum([0.0, *(item.cost.most / item.parts for item in queue)])
    middles: Loads = (ends[1:] + ends[:-1]) / max(2 * ends[-1], 1e-300)
    return middles
