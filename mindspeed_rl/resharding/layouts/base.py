"""What every layout answers, and the shared way to answer it from a weight table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mindspeed_rl.models.rules import Row
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.resharding.boxes import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """This rectangle of that HF tensor lives at that rectangle of this local parameter."""

    hf_name: str
    hf_box: Box
    param: str
    param_box: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A piece together with every rank that holds exactly this piece.

    ``holders`` is an arithmetic progression, so that it costs nothing for 4096 ranks. A ``mirror``
    repeats another shard (tied embeddings, replicated key/value heads): it receives but is never a
    source, so the shards that are no mirrors hold every element exactly once.
    """

    piece: Piece
    holders: range
    mirror: bool = False


class ShardLayout(Protocol):
    """One side of a reshard, as pure functions of (spec, layout, rank)."""

    @property
    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All HF tensors in a fixed order with their whole shapes."""
        ...

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """All distinct pieces of an HF tensor with their holders."""
        ...

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Shape of every local parameter of a rank."""
        ...


def pieces_of(layout: ShardLayout, rank: int) -> Iterator[Shard]:
    """The shards of ``layout`` that ``rank`` holds, in the order of the HF tensors."""
    for hf_name in layout.hf_shapes:
        for shard in layout.shards(hf_name):
            if rank in shard.holders:
                yield shard


def merge_holders(several: list[range]) -> list[range]:
    """The ranges as one, where they interleave into an arithmetic progression."""
    first, count = several[0], len(several)
    if count == 1:
        return several
    starts = [holders.start for holders in several]
    gap = starts[1] - starts[0]
    evenly = gap > 0 and starts == list(range(starts[0], starts[0] + gap * count, gap))
    alike = all(h.step == first.step and len(h) == len(first) for h in several)
    if evenly and alike and (gap * count == first.step or len(first) == 1):
        return [range(starts[0], several[-1][-1] + 1, gap)]
    return several


def layer_name(pattern: str, layer: int) -> str:
    """A name with its layer filled in."""
    return pattern.replace("{l}", str(layer))


@dataclass(frozen=True)
class RowPlacement:
    """One row at one global layer: its local name and the holders of each tensor-parallel share."""

    row: Row
    layer: int
    param: str
    holders: tuple[range, ...]
    mirror: bool = False


@dataclass(frozen=True)
class TableLayout(ABC):
    """A layout made of rows: the part that trainer and engine share.

    Subclasses say where each row lives (:meth:`placements`) and how the vocabulary is padded.
    """

    spec: ModelSpec

    @property
    @abstractmethod
    def vocab_multiple(self) -> int:
        """The padded vocabulary is a multiple of this."""

    @abstractmethod
    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer, in the order of the table."""

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """All HF tensors in table order with their whole shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for place in self.placements():
            for name, shape in self._hf_shapes(place).items():
                shapes.setdefault(name, shape)
        return shapes

    def _hf_name(self, place: RowPlacement, pattern: str) -> str:
        if self.spec.tie_embeddings and place.row.tied_to:
            return place.row.tied_to
        return layer_name(pattern, place.layer)

    def _hf_shapes(self, place: RowPlacement) -> dict[str, tuple[int, ...]]:
        shapes = place.row.hf_shapes(self.spec)
        return {self._hf_name(place, name): shape for name, shape in shapes.items()}

    @cached_property
    def _by_hf_name(self) -> dict[str, list[RowPlacement]]:
        index: dict[str, list[RowPlacement]] = {}
        for place in self.placements():
            for name in self._hf_shapes(place):
                index.setdefault(name, []).append(place)
        return index

    @cached_property
    def _shards(self) -> dict[str, tuple[Shard, ...]]:
        return {}

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """All distinct pieces of an HF tensor with their holders."""
        known = self._shards.get(hf_name)
        if known is None:
            known = tuple(self._make_shards(hf_name))
            self._shards[hf_name] = known
        return known

    def _make_shards(self, hf_name: str) -> Iterator[Shard]:
        holders_of: dict[Piece, list[range]] = {}
        mirrors: set[Piece] = set()
        for place in self._by_hf_name[hf_name]:
            count = len(place.holders)
            for index, holders in enumerate(place.holders):
                for cut in place.row.cuts(self.spec, index, count, self.vocab_multiple):
                    if self._hf_name(place, cut.hf_name) == hf_name:
                        piece = Piece(hf_name, cut.hf_box, place.param, cut.param_box)
                        holders_of.setdefault(piece, []).append(holders)
                        if place.mirror:
                            mirrors.add(piece)
        for piece, several in holders_of.items():
            for position, holders in enumerate(merge_holders(several)):
                yield Shard(piece, holders, piece in mirrors or position > 0)

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of every local parameter of a rank."""
        return {
            place.param: place.row.local_shape(self.spec, len(place.holders), self.vocab_multiple)
            for place in self.placements()
            if any(rank in holders for holders in place.holders)
        }

    def check_rows(self, rows: tuple[Row, ...], count: int) -> None:
        """Refuse a tensor-parallel size that some row cannot be cut into."""
        for row in rows:
            row.check(self.spec, count)
            row.local_shape(self.spec, count, self.vocab_multiple)
