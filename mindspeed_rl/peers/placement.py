"""Who keeps whose copies, and which of them a job goes on from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl.peers.files import CopyId


@dataclass(frozen=True, slots=True)
class Nodes:
    """The ranks of each node, in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, places: Sequence[str]) -> Nodes:
        """Group ranks by the names of their nodes' folders, in rank order."""
        found: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    def node_of(self, rank: int) -> int:
        """Return the index of the node of a rank."""
        return next(index for index, ranks in enumerate(self.ranks) if rank in ranks)

    def keeper(self, rank: int) -> int:
        """Return the rank of the next node that takes the copies of ``rank``.

        Of one node: the rank itself, since the folder is common to the node.
        """
        node = self.node_of(rank)
        after = self.ranks[(node + 1) % len(self.ranks)]
        position = self.ranks[node].index(rank)
        return rank if len(self.ranks) == 1 else after[position % len(after)]

    def kept_by(self, keeper: int) -> tuple[int, ...]:
        """Return the ranks of other nodes whose copies ``keeper`` takes."""
        every = (rank for ranks in self.ranks for rank in ranks)
        return tuple(rank for rank in every if rank != keeper and self.keeper(rank) == keeper)


@dataclass(frozen=True, slots=True)
class Sources:
    """The step that a job goes on from, and the node that gives the copy of each rank."""

    step: int
    node_of_copy: tuple[int, ...]


def newest_complete(
    nodes: Nodes,
    copies: Sequence[Mapping[CopyId, str]],
    runs: Sequence[str],
    damaged: Collection[tuple[int, CopyId]] = (),
) -> Sources | None:
    """Return the newest step of which every rank's state is on some node; ``None``: there is none.

    A rank's own node is preferred.

    Args:
        nodes: Ranks of each node.
        copies: Copies that each node has, with the digests of their runs.
        runs: Digest of the run of every rank, which the copy must have.
        damaged: Copies on nodes that are not to be taken.
    """
    steps = {copy.step for of_node in copies for copy in of_node}
    for step in sorted(steps, reverse=True):
        chosen = []
        for rank, run in enumerate(runs):
            own, copy = nodes.node_of(rank), CopyId(step, rank)
            holders = [
                node
                for node, of_node in enumerate(copies)
                if of_node.get(copy) == run and (node, copy) not in damaged
            ]
            chosen += [own] if own in holders else holders[:1]
        if len(chosen) == len(runs):
            return Sources(step, tuple(chosen))
    return None
