"""Collectives of the baselines, counted where they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mindspeed_rl.parallel.groups import rank_lists
from mindspeed_rl.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of this rank; a group of one rank needs none.

    Attributes:
        name: of the axis.
        ranks: global ranks in the order of the group.
        index: this rank's place among them.
        handle: the process group.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class TrainerGroups:
    """This rank's groups of the training layout.

    ``block`` is the tensor-and-expert group: the ``etp x ep`` ranks that share all experts of a
    layer.
    """

    tp: Group
    pp: Group
    etp: Group
    ep: Group
    block: Group


def trainer_groups(layout: ParallelLayout, rank: int) -> TrainerGroups:
    """Make all groups. Collective: the world."""
    lists = rank_lists(layout)
    size = layout.etp * layout.ep
    lists["block"] = [list(range(n, n + size)) for n in range(0, layout.world, size)]
    made = {name: _make(name, lists[name], rank) for name in TrainerGroups.__slots__}
    return TrainerGroups(**made)


def _make(name: str, lists: Sequence[Sequence[int]], rank: int) -> Group:
    mine = None
    for ranks in lists:
        handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(name, tuple(ranks), ranks.index(rank), handle)
    assert mine is not None, f"rank {rank} is in none of {lists}"
    return mine


class Wire:
    """Runs collectives and counts what crosses the wire, by the rules of ``peer_volumes``.

    Attributes:
        sent_bytes: by this rank, since the beginning.
        received_bytes: by this rank.
        num_calls: collectives.
        received_by: received bytes by kind of collective and axis, e.g. ``("spread", "tp")``.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.num_calls = 0
        self.received_by: Counter[tuple[str, str]] = Counter()

    def spread(self, slots: Sequence[torch.Tensor], group: Group) -> None:
        """All-gather in place: every rank's own slot reaches the same slot of all. Collective.

        Slots may differ in size, and be empty. One broadcast per slot, all at once: over gloo this
        moves bytes about as fast as its all-to-all, where its own all_gather copies everything more
        often (the benchmark prints the bandwidth of each).

        Args:
            slots: one contiguous tensor per rank of the group, of equal sizes on all ranks.
            group: of this rank.
        """
        num_ranks = len(group.ranks)
        if num_ranks == 1:
            return
        pending = []
        for index, slot in enumerate(slots):
            if not slot.numel():
                continue
            size = slot.numel() * slot.element_size()
            pending.append(
                dist.broadcast(slot, group.ranks[index], group=group.handle, async_op=True)
            )
            self.num_calls += 1
            if index != group.index:
                self._receive("spread", group, size)
            self.sent_bytes += size if group.index != (index - 1) % num_ranks else 0
        for work in pending:
            work.wait()

    def exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
        group: Group,
    ) -> None:
        """All-to-all-v of elements; no rank sends to itself. Collective."""
        if len(group.ranks) == 1:
            return
        assert not send_sizes[group.index] and not receive_sizes[group.index]
        dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group.handle)
        self.num_calls += 1
        self._receive("exchange", group, sum(receive_sizes) * received.element_size())
        self.sent_bytes += sum(send_sizes) * sent.element_size()

    def _receive(self, kind: str, group: Group, size: int) -> None:
        self.received_bytes += size
        self.received_by[kind, group.name] += size
