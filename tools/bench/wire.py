"""Collectives of the baselines, counted where they are called."""

from __future__ import annotations

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
        ranks: global ranks in the order of the group.
        index: this rank's place among them.
        handle: the process group.
    """

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
    made = {name: _make(lists[name], rank) for name in TrainerGroups.__slots__}
    return TrainerGroups(**made)


def _make(lists: Sequence[Sequence[int]], rank: int) -> Group:
    mine = None
    for ranks in lists:
        handle = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(tuple(ranks), ranks.index(rank), handle)
    assert mine is not None, f"rank {rank} is in none of {lists}"
    return mine


class Wire:
    """Runs collectives and counts what crosses the wire, by the rules of ``peer_volumes``.

    Attributes:
        sent_bytes: by this rank, since the beginning.
        received_bytes: by this rank.
        num_calls: collectives.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.num_calls = 0

    def spread(self, slots: Sequence[torch.Tensor], group: Group) -> None:
        """All-gather in place: every rank's own slot reaches the same slot of all. Collective.

        Slots may differ in size, and be empty. One broadcast per slot, all at once: over gloo this
        moves bytes as fast as its all-to-all, where its all_gather_into_tensor copies everything
        twice more (the first lines of the benchmark show both).

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
            self.received_bytes += size if index != group.index else 0
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
        self.received_bytes += sum(receive_sizes) * received.element_size()
        self.sent_bytes += sum(send_sizes) * sent.element_size()
