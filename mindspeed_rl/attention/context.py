"""The ranks that share a packed row, and how they attend to it together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share a row (context parallelism), seen from one of them.

    A row carries its own group, so rows of one step may be shared by different ranks. The ranks of
    a group form ``size / ulysses`` blocks of consecutive ranks: within a block tokens are exchanged
    for heads, and keys travel around a ring of the ranks with the same place in their block.

    Attributes:
        size: Number of ranks; 1: no context parallelism.
        rank: Position of this rank in the group.
        kind: ``"all_gather"``, ``"p2p"``, ``"a2a"`` or ``"a2a+p2p"``.
        ulysses: Ranks that exchange tokens for heads; 1: none do.
        group: Process group of these ranks; ``None``: this rank is alone, or the group is for
            plans only, which exchange nothing.
    """

    size: int = 1
    rank: int = 0
    kind: str = "all_gather"
    ulysses: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert self.size % self.ulysses == 0, f"{self.size} ranks in blocks of {self.ulysses}"

    @property
    def gathers(self) -> bool:
        """Whether every rank gathers the keys and values of the whole row."""
        return self.size > 1 and self.kind == "all_gather"

    @property
    def ring_size(self) -> int:
        """Number of ranks around which keys travel; 1: they do not."""
        return 1 if self.kind == "all_gather" else self.size // self.ulysses

    @property
    def ring_rank(self) -> int:
        """Position of this rank in its ring."""
        return 0 if self.kind == "all_gather" else self.rank // self.ulysses

    @property
    def block(self) -> range:
        """The ranks of the group with which this rank exchanges tokens for heads."""
        first = self.rank - self.rank % self.ulysses
        return range(first, first + self.ulysses)

    @property
    def next(self) -> int:
        """The rank of the group that this rank's keys go to."""
        return (self.rank + self.ulysses) % self.size

    @property
    def previous(self) -> int:
        """The rank of the group that keys come from."""
        return (self.rank - self.ulysses) % self.size


def context_group(
    kind: str, size: int, rank: int, ulysses: int = 1, group: dist.ProcessGroup | None = None
) -> ContextGroup:
    """Return the group of a kind of context parallelism.

    Args:
        kind: Kind of the run, see :class:`ContextGroup`.
        size: Number of ranks that share the row.
        rank: Position of this rank among them.
        ulysses: Ranks that exchange tokens for heads in ``"a2a+p2p"``. A group that they do not
            divide takes the largest number that divides both.
        group: Process group of these ranks, see :class:`ContextGroup`.
    """
    blocks = {"a2a": size, "a2a+p2p": math.gcd(size, ulysses)}
    return ContextGroup(size, rank, kind, blocks.get(kind, 1), group)
