"""What every layout answers, and the shared way to answer it from a weight table."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Protocol

from mindspeed_rl.core.boxes import PLAIN, Box, ParamView
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.rules import Cut, Share, WeightRow
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.owner_ranks import boxes_kept_twice, merge_owner_ranks


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

    ``owner_ranks`` is an arithmetic progression, so that it costs nothing for 4096 ranks. A replica
    repeats another shard (tied embeddings, replicated key/value heads, redundant experts): the
    shards that are no replicas hold every element exactly once.
    """

    piece: Piece
    owner_ranks: range
    is_replica: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """HF tensors that are placed alike: one kind of tensor at one layer, with all its experts.

    Attributes:
        key: :meth:`ShardLayout.unit_of` of each of them.
        lane: which ranks hold them: the pipeline stage.
        layer: the global layer; 0 outside the layers.
        names: the HF tensors.
    """

    key: str
    stage: int
    layer: int
    names: tuple[str, ...]


class ShardLayout(Protocol):
    """One side of a reshard, as pure functions of (spec, layout, rank)."""

    @property
    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All HF tensors in a fixed order with their whole shapes. O(model)."""
        ...

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        """Whole shape of an HF tensor."""
        ...

    def dtype_of(self, hf_name: str) -> str:
        """Element type of an HF tensor on both sides; empty: that of the model."""
        ...

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """All distinct pieces of an HF tensor with their owner ranks."""
        ...

    def held_names(self, rank: int) -> Iterable[str]:
        """The HF tensors of which a rank holds something, each once. O(what the rank holds)."""
        ...

    def units(self) -> Iterable[Unit]:
        """All HF tensors. O(model)."""
        ...

    def unit_of(self, hf_name: str) -> str:
        """Key of the unit that a tensor belongs to."""
        ...

    def placement_key(self, hf_name: str) -> Hashable:
        """Equal for tensors of equal rectangles on equal ranks, wherever these store them."""
        ...

    def num_placed_alike(self, hf_name: str) -> tuple[int, int]:
        """Layers and experts of one kind that the same ranks hold: their rotations even out."""
        ...

    @property
    def wants_whole_tensors(self) -> bool:
        """Whether a target wants tensors complete one after another, not a slice of many."""
        ...

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Shape of every local parameter of a rank."""
        ...

    def fingerprint(self) -> Iterable[str]:
        """Texts that differ between layouts that place anything differently."""
        ...


def pieces_of(layout: ShardLayout, rank: int) -> Iterator[Shard]:
    """The shards of ``layout`` that ``rank`` holds, tensor by tensor."""
    for hf_name in layout.held_names(rank):
        for shard in layout.shards(hf_name):
            if rank in shard.owner_ranks:
                yield shard


def layer_name(pattern: str, layer: int) -> str:
    """A name with its layer filled in."""
    return pattern.replace("{l}", str(layer))


def expert_name(pattern: str, expert: int) -> str:
    """A name with its expert filled in."""
    return pattern.replace("{e}", str(expert))


_NO_STAGE = -1
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@lru_cache(maxsize=1 << 17)
def locate(hf_name: str) -> tuple[str, int, int]:
    """Pattern, layer and expert of an HF name: the inverse of filling them in."""
    numbers = [int(text) for text in _NUMBER.findall(hf_name)]
    if not numbers:
        return hf_name, 0, 0
    blanks = iter(("{l}", "{e}"))
    pattern = _NUMBER.sub(lambda match: next(blanks, match[0]), hf_name)
    return pattern, numbers[0], numbers[1] if len(numbers) > 1 else 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A share of a row and the ranks that hold it."""

    share: Share
    owner_ranks: range


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """One row at one global layer and expert: its local name and who holds which share."""

    row: WeightRow
    param: str
    shares: tuple[Placed, ...]
    is_replica: bool = False


@dataclass(frozen=True)
class TableLayout(ABC):
    """A layout made of rows: the part that trainer and engine share.

    Subclasses say which rows exist, where each of them lives (:meth:`places`) and what a rank holds
    (:meth:`held_by`); both are arithmetic, so that nothing here costs more than what is asked for.
    """

    spec: ModelSpec

    @property
    @abstractmethod
    def present_rows(self) -> tuple[WeightRow, ...]:
        """The rows that have a parameter in this layout, in the order of the table."""

    @abstractmethod
    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        """Where one row lives at one layer and expert: one place, or one per redundant copy."""

    @abstractmethod
    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, int]]:
        """Row, layer and expert of everything that a rank holds, in the order of the table."""

    @abstractmethod
    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        """The pipeline stage that holds a row at a layer."""

    @property
    @abstractmethod
    def experts_per_rank(self) -> int:
        """Experts of a layer that a rank holds; 0 without experts."""

    def _experts(self, row: WeightRow) -> range:
        return range(self.spec.num_experts) if isinstance(row, ExpertRow) else range(1)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what is cached goes by the identity of rows."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # By identity: rows live as long as their table.
    @cached_property
    def _patterns_of_rows(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """HF name pattern -> shape, for each row; ties resolved."""
        return {
            id(row): {
                row.tied_to if self.spec.tie_embeddings and row.tied_to else pattern: shape
                for pattern, shape in row.hf_shapes(self.spec).items()
            }
            for row in self.present_rows
        }

    @cached_property
    def _rows_of_patterns(self) -> dict[str, list[WeightRow]]:
        index: dict[str, list[WeightRow]] = {}
        for row in self.present_rows:
            for pattern in self._patterns_of_rows[id(row)]:
                index.setdefault(pattern, []).append(row)
        return index

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """All HF tensors in table order with their whole shapes. O(model)."""
        return {
            expert_name(layer_name(pattern, layer), expert): shape
            for row in self.present_rows
            for layer in row.layers(self.spec)
            for expert in self._experts(row)
            for pattern, shape in self._patterns_of_rows[id(row)].items()
        }

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        """Whole shape of an HF tensor."""
        pattern = locate(hf_name)[0]
        return self._patterns_of_rows[id(self._rows_of_patterns[pattern][0])][pattern]

    def dtype_of(self, hf_name: str) -> str:
        """Element type of an HF tensor on both sides; empty: that of the model."""
        return self._rows_of_patterns[locate(hf_name)[0]][0].dtype

    def held_names(self, rank: int) -> list[str]:
        """The HF tensors of which a rank holds something, each once, in the order of the table."""
        return list(
            dict.fromkeys(
                expert_name(layer_name(pattern, layer), expert)
                for row, layer, expert in self.held_by(rank)
                for pattern in self._patterns_of_rows[id(row)]
            )
        )

    def units(self) -> Iterator[Unit]:
        """All HF tensors, in the order of the table. O(model)."""
        for pattern, rows in self._rows_of_patterns.items():
            row = rows[0]
            experts = self._experts(row)
            for layer in row.layers(self.spec):
                named = layer_name(pattern, layer)
                names = tuple(expert_name(named, expert) for expert in experts)
                # a tied embedding is on two stages: it waits behind the layers of neither
                stage = self.pipeline_stage_of(row, layer) if len(rows) == 1 else _NO_STAGE
                yield Unit(named, stage, layer, names)

    def unit_of(self, hf_name: str) -> str:
        """The name with its expert left open."""
        pattern, layer, _ = locate(hf_name)
        return layer_name(pattern, layer)

    def placement_key(self, hf_name: str) -> Hashable:
        """Pattern and pipeline stage: a row cuts one pattern alike at all layers and experts.

        Patterns of one shape may be cut apart: keys and values, where more ranks share them than
        there are heads.
        """
        pattern, layer, _ = locate(hf_name)
        return pattern, self.pipeline_stage_of(self._rows_of_patterns[pattern][0], layer)

    @cached_property
    def _layers_of_classes(self) -> Counter[Hashable]:
        return Counter(
            (pattern, self.pipeline_stage_of(rows[0], layer))
            for pattern, rows in self._rows_of_patterns.items()
            for layer in rows[0].layers(self.spec)
        )

    def num_placed_alike(self, hf_name: str) -> tuple[int, int]:
        """Layers and experts of one kind that the same ranks hold: their rotations even out."""
        is_expert = isinstance(self._rows_of_patterns[locate(hf_name)[0]][0], ExpertRow)
        num_layers = self._layers_of_classes[self.placement_key(hf_name)]
        return num_layers, self.experts_per_rank if is_expert else 1

    @property
    def wants_whole_tensors(self) -> bool:
        """No: parameters exist anyway."""
        return False

    def _cuts_of(self, row: WeightRow, share: Share) -> tuple[Cut, ...]:
        """The cuts of a row at a share; equal at all layers and experts. Equal cuts are one."""
        key = (id(row), share)
        known = self._cuts_of_rows.get(key)
        if known is None:
            known = tuple(self._cuts.setdefault(cut, cut) for cut in row.cuts(self.spec, share))
            self._cuts_of_rows[key] = known
        return known

    @cached_property
    def _cuts_of_rows(self) -> dict[tuple[int, Share], tuple[Cut, ...]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[Cut, Cut]:
        return {}

    @cached_property
    def _shards(self) -> dict[str, tuple[Shard, ...]]:
        return {}

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """All distinct pieces of an HF tensor with their owner ranks."""
        known = self._shards.get(hf_name)
        if known is None:
            known = tuple(self._make_shards(hf_name))
            self._shards[hf_name] = known
        return known

    def _make_shards(self, hf_name: str) -> Iterator[Shard]:
        found: dict[tuple[int, str, bool], tuple[Cut, list[range]]] = {}
        pattern, layer, expert = locate(hf_name)
        for row in self._rows_of_patterns[pattern]:
            tied = self.spec.tie_embeddings and row.tied_to == pattern
            for place in self.places(row, layer, expert):
                for placed in place.shares:
                    for cut in self._cuts_of(row, placed.share):
                        if tied or cut.hf_name == pattern:
                            key = (id(cut), place.param, place.is_replica)
                            found.setdefault(key, (cut, []))[1].append(placed.owner_ranks)
        kept_twice = boxes_kept_twice(found.values())
        for (_, param, is_replica), (cut, several) in found.items():
            piece = Piece(hf_name, cut.hf_box, param, cut.param_box, cut.view)
            merged = several if cut.hf_box in kept_twice else merge_owner_ranks(several)
            for position, owner_ranks in enumerate(merged):
                yield Shard(piece, owner_ranks, is_replica or position > 0)

    def _parameters(self, rank: int) -> dict[str, tuple[WeightRow, Share]]:
        """Row and share of every local parameter of a rank, in the order of the table."""
        return {
            place.param: (row, placed.share)
            for row, layer, expert in self.held_by(rank)
            for place in self.places(row, layer, expert)
            for placed in place.shares
            if rank in placed.owner_ranks
        }

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of every local parameter of a rank."""
        return {
            param: row.local_shape(self.spec, share)
            for param, (row, share) in self._parameters(rank).items()
        }

    def local_bytes(self, rank: int, item_bytes: int) -> dict[str, int]:
        """Bytes of every local parameter; ``item_bytes`` where it has the model's type."""
        return {
            param: prod(row.local_shape(self.spec, share))
            * (4 if row.dtype == "float32" else item_bytes)
            for param, (row, share) in self._parameters(rank).items()
        }

    def local_padding(self, rank: int) -> dict[str, int]:
        """Declared padding, in elements, of every local parameter of a rank."""
        return {
            param: row.padding(self.spec, share)
            for param, (row, share) in self._parameters(rank).items()
        }

    def fingerprint(self) -> Iterator[str]:
        """The layout's own fields, and the rows of the table."""
        yield repr(self)
        yield from map(repr, self.present_rows)

    def check_rows(self, rows: Iterable[WeightRow], count: int) -> None:
        """Refuse a number of tensor-parallel ranks that some row cannot be cut into."""
        for row in rows:
            row.check(self.spec, count)
            row.hf_shapes(self.spec)
