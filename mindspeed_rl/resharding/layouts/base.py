"""What every layout answers, and the shared way to answer it from a weight table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Protocol

from mindspeed_rl.models.rules import Cut, Row, Share
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.resharding.boxes import PLAIN, Box, ParamView


@dataclass(frozen=True, slots=True)
class Piece:
    """This rectangle of that HF tensor lives at that rectangle of this view of a parameter."""

    hf_name: str
    hf_box: Box
    param: str
    param_box: Box
    view: ParamView = PLAIN


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

    def dtype_of(self, hf_name: str) -> str:
        """Element type of an HF tensor on both sides; empty: that of the model."""
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


def expert_name(pattern: str, expert: int) -> str:
    """A name with its expert filled in."""
    return pattern.replace("{e}", str(expert))


@dataclass(frozen=True, slots=True)
class Placed:
    """A share of a row and the ranks that hold it."""

    share: Share
    holders: range


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """One row at one global layer and expert: its local name and who holds which share."""

    row: Row
    layer: int
    expert: int
    param: str
    shares: tuple[Placed, ...]
    mirror: bool = False


@dataclass(frozen=True)
class TableLayout(ABC):
    """A layout made of rows: the part that trainer and engine share.

    Subclasses say where each row lives (:meth:`placements`) and how it is padded.
    """

    spec: ModelSpec

    @abstractmethod
    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer and expert, in the order of the table."""

    @cached_property
    def _placements(self) -> tuple[RowPlacement, ...]:
        return tuple(self.placements())

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """All HF tensors in table order with their whole shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for place in self._placements:
            for name, shape in self._hf_shapes(place).items():
                shapes.setdefault(name, shape)
        return shapes

    def dtype_of(self, hf_name: str) -> str:
        """Element type of an HF tensor on both sides; empty: that of the model."""
        return self._by_hf_name[hf_name][0].row.dtype

    def _hf_name(self, place: RowPlacement, pattern: str) -> str:
        if self.spec.tie_embeddings and place.row.tied_to:
            return place.row.tied_to
        return expert_name(layer_name(pattern, place.layer), place.expert)

    def _hf_shapes(self, place: RowPlacement) -> dict[str, tuple[int, ...]]:
        shapes = self._row_shapes(place)
        return {self._hf_name(place, name): shape for name, shape in shapes.items()}

    def _row_shapes(self, place: RowPlacement) -> dict[str, tuple[int, ...]]:
        """Name patterns of a row with their shapes; equal at all layers and experts."""
        key = id(place.row)
        if key not in self._shapes_of_rows:
            self._shapes_of_rows[key] = place.row.hf_shapes(self.spec)
        return self._shapes_of_rows[key]

    def _cuts_of(self, row: Row, share: Share) -> tuple[Cut, ...]:
        """The cuts of a row at a share; equal at all layers and experts."""
        key = (id(row), share)
        if key not in self._cuts_of_rows:
            self._cuts_of_rows[key] = tuple(row.cuts(self.spec, share))
        return self._cuts_of_rows[key]

    # By identity: rows live as long as their table.
    @cached_property
    def _shapes_of_rows(self) -> dict[int, dict[str, tuple[int, ...]]]:
        return {}

    @cached_property
    def _cuts_of_rows(self) -> dict[tuple[int, Share], tuple[Cut, ...]]:
        return {}

    @cached_property
    def _by_hf_name(self) -> dict[str, list[RowPlacement]]:
        index: dict[str, list[RowPlacement]] = {}
        for place in self._placements:
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
            patterns = {n for n in self._row_shapes(place) if self._hf_name(place, n) == hf_name}
            for placed in place.shares:
                for cut in self._cuts_of(place.row, placed.share):
                    if cut.hf_name in patterns:
                        piece = Piece(hf_name, cut.hf_box, place.param, cut.param_box, cut.view)
                        holders_of.setdefault(piece, []).append(placed.holders)
                        if place.mirror:
                            mirrors.add(piece)
        for piece, several in holders_of.items():
            for position, holders in enumerate(merge_holders(several)):
                yield Shard(piece, holders, piece in mirrors or position > 0)

    @cached_property
    def _held(self) -> dict[range, list[tuple[int, str, Row, Share]]]:
        """(position in the table, parameter, row, share) by the ranks that hold it."""
        held: dict[range, list[tuple[int, str, Row, Share]]] = {}
        for position, place in enumerate(self._placements):
            for placed in place.shares:
                entry = (position, place.param, place.row, placed.share)
                held.setdefault(placed.holders, []).append(entry)
        return held

    @property
    def holders(self) -> Iterable[range]:
        """The distinct sets of ranks that hold a share of some row."""
        return self._held

    def _parameters(self, rank: int) -> dict[str, tuple[Row, Share]]:
        """Row and share of every local parameter of a rank, in the order of the table."""
        mine = [e for holders, entries in self._held.items() if rank in holders for e in entries]
        return {param: (row, share) for _, param, row, share in sorted(mine, key=itemgetter(0))}

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of every local parameter of a rank."""
        return {
            param: row.local_shape(self.spec, share)
            for param, (row, share) in self._parameters(rank).items()
        }

    def local_padding(self, rank: int) -> dict[str, int]:
        """Declared padding, in elements, of every local parameter of a rank."""
        return {
            param: row.padding(self.spec, share)
            for param, (row, share) in self._parameters(rank).items()
        }

    def check_rows(self, rows: Iterable[Row], count: int) -> None:
        """Refuse a number of tensor-parallel ranks that some row cannot be cut into."""
        for row in rows:
            row.check(self.spec, count)
            row.hf_shapes(self.spec)
