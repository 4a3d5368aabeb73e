"""Execution of reshard plans round by round, with two rounds in flight."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import NamedTuple

import torch

from mindspeed_rl.core.garbage import without_collection
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weights.exchange import (
    ALIGNMENT_BYTES,
    Exchange,
    RankMessages,
    Round,
    copy_within,
)
from mindspeed_rl.weights.planner import (
    Overlaps,
    ReshardPlan,
    Transfer,
    check_same_tensors,
    plan_reshard,
)
from mindspeed_rl.weights.schedule import Schedule, plan_schedule
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic
from mindspeed_rl.weights.transports import Transport

ROUNDS_IN_FLIGHT = 2


def round_bytes(bucket_bytes: int) -> int:
    """Return the budget of one round: the rounds in flight share the bucket."""
    return max(0, bucket_bytes // ROUNDS_IN_FLIGHT - ALIGNMENT_BYTES)


def wire_dtype(declared: str, default: torch.dtype) -> torch.dtype:
    """Return the element type on the wire of a tensor; ``declared`` is ``""`` where it has none."""
    if not declared:
        return default
    dtype: torch.dtype = getattr(torch, declared)
    return dtype


@without_collection()
def split_rounds(
    plan: ReshardPlan, schedule: Schedule, source: ShardLayout, num_hops: int
) -> tuple[Round, ...]:
    """Distribute a plan over the rounds of a schedule. Both ends keep the plan's order."""
    count = schedule.num_rounds
    slots_of = cache(partial(schedule.slots_of, source))

    def by_round(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
        rounds: list[list[Transfer]] = [[] for _ in range(count)]
        for transfer in transfers:
            slots = slots_of(transfer.hf_name)
            first = slots[0]
            turn = first.round_of(transfer.src_rank, transfer.dst_rank) - first.round
            for slot, part in zip(slots, transfer.parts(first.parts), strict=True):
                if part:
                    rounds[slot.round + turn].append(part)
        return rounds

    sends, receives, copies = map(by_round, (plan.sends, plan.receives, plan.copies))
    local_duplicates: list[list[Transfer]] = [[] for _ in range(count)]
    # Duplicates are copied whole, after the last slice: their slices may differ from what arrives.
    for transfer in plan.local_duplicates:
        last = slots_of(transfer.hf_name)[-1].last_round
        local_duplicates[last].append(transfer)
    return tuple(
        Round(
            tuple(
                RankMessages(
                    _by_peer(sends[i], hop, lambda t: t.dst_rank),
                    _by_peer(receives[i], hop, lambda t: t.src_rank),
                )
                for hop in range(1, num_hops + 1)
            ),
            tuple(copies[i]),
            tuple(local_duplicates[i]),
            schedule.completed[i],
            schedule.dtypes[i],
        )
        for i in range(count)
    )


def _by_peer(
    transfers: Iterable[Transfer], hop: int, peer: Callable[[Transfer], int]
) -> dict[int, tuple[Transfer, ...]]:
    groups: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        if transfer.hop == hop:
            groups.setdefault(peer(transfer), []).append(transfer)
    return {p: tuple(group) for p, group in sorted(groups.items())}


class RankRounds(NamedTuple):
    """What one rank does in a reshard: its plan, the rounds of all, and its part of each."""

    plan: ReshardPlan
    schedule: Schedule
    rounds: tuple[Round, ...]


@without_collection()
def plan_rounds(overlaps: Overlaps, rank: int, *, bucket_bytes: int, item_bytes: int) -> RankRounds:
    """Plan one rank's part of a reshard. Local and pure.

    Args:
        overlaps: Rectangles that have to arrive.
        rank: Rank to plan for.
        bucket_bytes: Bound of all staging of a rank: what the rounds in flight send and receive.
        item_bytes: Bytes of an element on the wire, for tensors that declare no type.

    Raises:
        UsageError: The budget is too small.
    """
    source, target, relay = overlaps.source, overlaps.target, overlaps.relay
    per_node = overlaps.ranks_per_node
    plan = plan_reshard(source, target, rank, per_node, relay=relay, overlaps=overlaps)
    schedule = plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes(bucket_bytes),
        item_bytes=item_bytes,
        ranks_per_node=per_node,
        relay=relay,
        overlaps=overlaps,
    )
    return RankRounds(plan, schedule, split_rounds(plan, schedule, source, 2 if relay else 1))


class Resharder:
    """A prepared reshard from one layout to another on this rank.

    Every rank plans alone, so all ranks compare digests of their plans before the first transfer.

    Args:
        source: Layout to read.
        target: Layout to write.
        rank: Global rank.
        ranks_per_node: Number of ranks per node; sources on the same node are preferred.
        transport: Transport that moves the messages.
        dtype: Element type on the wire of tensors that declare none: that of the target.
        bucket_bytes: Bound of all staging of this rank: what the rounds in flight send and receive.
        relay: Send each rectangle to a node once and forward it there.

    Attributes:
        traffic: The bytes that this rank moves at every run.
        rounds: Its part of every round.
        transport: Transport that moves the messages.
        dtype: Element type on the wire of tensors that declare none.

    Raises:
        RuntimeError: The layouts have different tensors.
        UsageError: The budget is too small.
    """

    def __init__(
        self,
        source: ShardLayout,
        target: ShardLayout,
        *,
        rank: int,
        ranks_per_node: int,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int,
        relay: bool = False,
    ) -> None:
        check_same_tensors(source, target)
        overlaps = Overlaps(source, target, ranks_per_node, relay)
        self.plan, self.schedule, self.rounds = plan_rounds(
            overlaps, rank, bucket_bytes=bucket_bytes, item_bytes=dtype.itemsize
        )
        bytes_of = element_bytes_of(source, dtype.itemsize)
        self.traffic = rank_traffic(self.plan, bytes_of, ranks_per_node)
        self.transport = transport
        self.dtype = dtype
        self._budget = bucket_bytes
        self._compared = False

    @torch.no_grad()
    def run(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        after_round: Callable[[Round], None] | None = None,
    ) -> None:
        """Move all weights. Collective over the transport's ranks.

        Args:
            read: Source parameters of this rank by name.
            write: Target parameters of this rank by name; the targets of a round must exist when it
                runs.
            after_round: Function that is called when the targets of a round are complete.

        Raises:
            RuntimeError: Some ranks have another plan; raised on all ranks, before the first round.
        """
        self.compare_plans()
        size, device = self._staging_bytes(), self.transport.device
        slots = min(ROUNDS_IN_FLIGHT, len(self.rounds))
        staging = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(slots)]
        on_the_way: Exchange | None = None
        for i, part in enumerate(self.rounds):
            dtype = wire_dtype(part.dtype, self.dtype)
            memory = staging[i % len(staging)]
            alone = self.schedule.alone_bytes
            started = Exchange(part, memory, dtype, self.transport, write, alone)
            started.post(0, read)
            copy_within(part.copies, read, write)
            if on_the_way is not None:
                on_the_way.finish(after_round)
            on_the_way = started
        if on_the_way is not None:
            on_the_way.finish(after_round)

    def _staging_bytes(self) -> int:
        """Return the bytes that the messages of the largest exchange need."""
        return max(
            (
                hop.staging_bytes(wire_dtype(part.dtype, self.dtype).itemsize)
                for part in self.rounds
                for hop in part.hops
            ),
            default=0,
        )

    def compare_plans(self) -> None:
        """Check once that all ranks have the same plan, with 32 bytes from each rank.

        Messages of different plans would hang or mix up tensors. Collective over the transport's
        ranks.

        Raises:
            RuntimeError: Some ranks have another plan; raised on all ranks.
        """
        if self._compared:
            return
        state = hashlib.blake2b(self.plan.digest.encode(), digest_size=32)
        transport = type(self.transport).__name__
        state.update(repr((self.dtype, self._budget, transport)).encode())
        digests = self.transport.all_gather(state.digest())
        usual, _ = Counter(digests).most_common(1)[0]
        if odd := [rank for rank, digest in enumerate(digests) if digest != usual]:
            raise RuntimeError(
                f"reshard: ranks {odd} of {len(digests)} have another plan than the rest (layouts, "
                "ranks per node, precision, --reshard-bucket-mb or --reshard-transport differ); "
                "start all nodes with the same flags, config.json and mindspeed_rl"
            )
        self._compared = True
