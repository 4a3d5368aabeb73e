"""Rounds of a reshard: which slices of which tensors travel together, under a byte budget.

The schedule is a pure function of the two layouts, so all ranks agree without communication.
Tensors queue up by pipeline stage of the source, and every round takes the next slice of every
queue, in proportion to the length of the queue. All stages thus send from the first round to the
last, and the sum over rounds of the busiest rank's bytes stays close to the bytes that the busiest
rank moves in all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weights.layouts.base import ShardLayout, Unit, element_bytes, locate
from mindspeed_rl.weights.planner import overlaps

_MAX_PARTS = 1 << 16

Loads = NDArray[np.float64]
# Units whose slices travel in the same rounds.
Batch = tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """A slice of a tensor's rectangles: ``part`` of ``parts`` travels in ``round``."""

    round: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds in which all tensors travel.

    Attributes:
        slots: Slots in order, by key of a unit or by name of a tensor; see :meth:`slots_of`.
        completed: For each round, the tensors that are complete after it.
        dtypes: For each round, the declared element type of its tensors; empty: that of the model.
    """

    slots: Mapping[str, tuple[Slot, ...]]
    completed: tuple[tuple[str, ...], ...]
    dtypes: tuple[str, ...]

    def slots_of(self, source: ShardLayout, hf_name: str) -> tuple[Slot, ...]:
        """Return the slots in which the slices of a tensor travel."""
        return self.slots.get(hf_name) or self.slots[source.unit_of(hf_name)]

    @property
    def num_rounds(self) -> int:
        return len(self.completed)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bounds of the bytes that ranks move for one unit.

    Attributes:
        loads: [hops, world] bytes that each rank sends plus receives if the whole unit travels.
        most: The largest of ``loads``.
        narrowest: The least extent of the unit's rectangles along the sliced dimension, which
            bounds the number of slices.
    """

    loads: Loads
    most: float
    narrowest: int


@dataclass(frozen=True, slots=True)
class _Item:
    """A slice of a unit, which travels in one round."""

    unit: Unit
    cost: _Cost
    part: int
    parts: int

    @property
    def loads(self) -> Loads:
        """Bound of the slice: slices of n rows into k parts have at most n / k + 1 rows."""
        if self.parts == 1:
            return self.cost.loads
        return self.cost.loads * (1 / self.parts + 1 / self.cost.narrowest)


@without_collection()
def plan_schedule(
    source: ShardLayout,
    target: ShardLayout,
    *,
    bucket_bytes: int,
    item_bytes: int,
    ranks_per_node: int,
    relay: bool = False,
) -> Schedule:
    """Make the rounds of a reshard, the same on every rank. A round has one element type.

    Args:
        source: Layout that is read.
        target: Layout that is written.
        bucket_bytes: Bound of send plus receive staging of one round on one rank.
        item_bytes: Bytes of one element on the wire, for tensors that declare no type.
        ranks_per_node: Number of ranks per node, the same as in the plans.
        relay: Whether rectangles are forwarded within nodes, the same as in the plans.

    Raises:
        UsageError: The budget is too small for the narrowest slices.
    """
    if bucket_bytes < 1:
        raise UsageError(f"--reshard-bucket-mb gives {bucket_bytes} bytes; must be positive")
    costs = _Costs(source, target, item_bytes, ranks_per_node, relay)
    stages_of: dict[str, dict[int, list[Batch]]] = {}
    for unit in sorted(source.units(), key=lambda unit: unit.layer):
        stages = stages_of.setdefault(source.dtype_of(unit.names[0]), {})
        batches = _tensors(source, unit, bucket_bytes // (2 * item_bytes))
        stages.setdefault(unit.stage, []).extend(
            batches if target.fills_tensor_by_tensor else [(unit,)]
        )
    slots: dict[str, list[Slot]] = {}
    completed: list[tuple[str, ...]] = []
    dtypes: list[str] = []
    for dtype in sorted(stages_of):
        rounds = _fill(list(stages_of[dtype].values()), costs, bucket_bytes)
        for items in rounds:
            for item in items:
                slot = Slot(len(completed), item.part, item.parts)
                slots.setdefault(item.unit.key, []).append(slot)
            whole = (i.unit.names for i in items if i.part == i.parts - 1)
            completed.append(tuple(name for names in whole for name in names))
        dtypes += [dtype] * len(rounds)
    return Schedule(
        {key: tuple(several) for key, several in slots.items()},
        tuple(completed),
        tuple(dtypes),
    )


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
    """Bounds of units, computed once for units that are placed alike."""

    def __init__(
        self,
        source: ShardLayout,
        target: ShardLayout,
        item_bytes: int,
        ranks_per_node: int,
        relay: bool,
    ) -> None:
        self._source, self._target = source, target
        self._item_bytes = item_bytes
        self._ranks_per_node, self._relay = ranks_per_node, relay
        self._known: dict[Hashable, _Cost] = {}

    def of(self, unit: Unit) -> _Cost:
        """Return the bounds of a unit."""
        first = unit.names[0]
        expert = locate(first)[2]
        key = (
            self._source.placement_key(first),
            self._target.placement_key(first),
            expert,
            len(unit.names),
        )
        if key not in self._known:
            self._known[key] = self._measure(unit)
        return self._known[key]

    def _measure(self, unit: Unit) -> _Cost:
        """Bound the bytes of each rank, independently of the rotation of the tensors.

        Every source is charged with what the busiest of the owner ranks sends, every destination
        with all that it needs. In hop 2 each of n destinations receives what it needs and sends
        less than that, n - 1 copies of one slice of n; where nodes differ in n, less than twice
        that.
        """
        loads: dict[tuple[int, range], float] = {}
        narrowest = _MAX_PARTS
        dtype = self._source.dtype_of(unit.names[0])
        size = element_bytes(dtype, self._item_bytes)
        for name in unit.names:
            found = overlaps(self._source, self._target, name, self._ranks_per_node, self._relay)
            for cell, dst, box, assigned in found:
                narrowest = min(narrowest, box.size[box.sliced_dim])
                num_bytes = float(box.num_elements * size)
                charges = [(1, ranks, assigned.most_sent) for ranks in cell.owner_ranks]
                charges += [(1, ranks, 1) for ranks in dst.owner_ranks]
                if assigned.hop.max(initial=0) == 2:
                    charges += [(2, ranks, 2 if assigned.even else 3) for ranks in dst.owner_ranks]
                for hop, ranks, times in charges:
                    loads[hop, ranks] = loads.get((hop, ranks), 0.0) + num_bytes * times
        world = 1 + max((ranks[-1] for _, ranks in loads), default=0)
        table = np.zeros((2 if self._relay else 1, world))
        for (hop, ranks), load in loads.items():
            table[hop - 1, ranks.start : ranks.stop : ranks.step] += load
        return _Cost(table, float(table.max(initial=0.0)), narrowest)


def _fill(stages: list[list[Batch]], costs: _Costs, bucket_bytes: int) -> list[list[_Item]]:
    """Return the slices of units that each round sends."""
    _check_budget(stages, costs, bucket_bytes)
    quantum = bucket_bytes / (2 * len(stages))
    queues = [[i for batch in stage for i in _slices(batch, costs, quantum)] for stage in stages]
    world = max(i.cost.loads.shape[1] for queue in queues for i in queue)
    most = max(len(queue) for queue in queues)
    total = np.sum([_total(queue, world) for queue in queues], axis=0)
    count = max(1, int(np.ceil(total.max() / bucket_bytes)))
    progress = [_progress(queue, world) for queue in queues]
    while True:
        rounds = _spread(queues, progress, min(count, most))
        largest = max(float(_total(items, world).max(initial=0.0)) for items in rounds)
        if largest <= bucket_bytes:
            return [items for items in rounds if items]
        if count >= most:
            raise _too_small(bucket_bytes, largest)
        count = min(most, max(count + 1, int(count * 1.1)))


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


def _total(items: list[_Item], world: int) -> Loads:
    """Return the load of every rank in its busier hop: [world]."""
    amounts: dict[tuple[int, int], tuple[_Item, int]] = {}
    for item in items:
        key = (id(item.cost), item.parts)
        amounts[key] = (item, amounts.get(key, (item, 0))[1] + 1)
    table = np.zeros((2, world))
    for item, times in amounts.values():
        hops, ranks = item.cost.loads.shape
        table[:hops, :ranks] += item.loads * times
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
        adding = items[0].cost.loads[:, some]
        hops, ranks = adding.shape
        parts = np.arange(1, len(items) + 1) / items[0].parts
        rising = load[:hops, :ranks] + parts[:, None, None] * adding
        load[:hops, :ranks] = rising[-1]
        reached.append(np.maximum(rising.max(axis=(1, 2)), reached[-1][-1]))
    ends = np.concatenate(reached)
    middles: Loads = (ends[1:] + ends[:-1]) / max(2 * ends[-1], 1e-300)
    return middles
