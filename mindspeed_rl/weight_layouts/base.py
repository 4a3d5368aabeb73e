"""The protocol of layouts, and :class:`TableLayout`, which implements it from a weight table."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Protocol

from mindspeed_rl.core.boxes import PLAIN, Box, ParamView
from mindspeed_rl.models.expert_rules import ExpertRow, StackedExperts
from mindspeed_rl.models.rules import Cut, Share, WeightRow
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of an HF tensor and the rectangle of a parameter's view that stores it."""

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
    shards that are not replicas hold every element exactly once.
    """

    piece: Piece
    owner_ranks: range
    is_replica: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """HF tensors that are placed alike: one kind of tensor at one layer, with all its experts.

    Attributes:
        key: :meth:`ShardLayout.unit_of` of each of the tensors.
        stage: Pipeline stage that holds them.
        layer: Global layer; 0 outside the layers.
        names: Names of the HF tensors.
    """

    key: str
    stage: int
    layer: int
    names: tuple[str, ...]

    @property
    def is_experts(self) -> bool:
        """Whether the tensors are those of several experts."""
        return len(self.names) > 1


class ShardLayout(Protocol):
    """One side of a reshard, as pure functions of (spec, layout, rank)."""

    @property
    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All HF tensors in a fixed order with their whole shapes. O(model)."""
        ...

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        """Return the whole shape of an HF tensor."""
        ...

    def dtype_of(self, hf_name: str) -> str:
        """Return the element type of an HF tensor on both sides; empty: that of the model."""
        ...

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """Return all distinct pieces of an HF tensor with their owner ranks."""
        ...

    def held_names(self, rank: int) -> Iterable[str]:
        """Return the HF tensors that a rank holds a part of, each once. O(what the rank holds)."""
        ...

    def held_runs(self, rank: int) -> Iterable[tuple[str, range]]:
        """Return the same by runs: names with ``{e}`` for the expert, and the experts of a run."""
        ...

    def run_of(self, hf_name: str) -> range:
        """Return the experts that are placed like the one that a tensor belongs to, itself too.

        They are neighbours, the same ranks hold the same rectangles of them, and where they share
        a parameter they lie in it one after another. ``range(1)`` outside of experts.
        """
        ...

    def param_like(self, piece: Piece, hf_name: str) -> str:
        """Return the parameter that keeps another tensor's rectangle at the place of a piece.

        The other tensor is an expert of the same run, or has the same :meth:`placement_key`.
        """
        ...

    def units(self) -> Iterable[Unit]:
        """Return the units of all HF tensors. O(model)."""
        ...

    def unit_of(self, hf_name: str) -> str:
        """Return the key of the unit that a tensor belongs to."""
        ...

    def placement_key(self, hf_name: str) -> Hashable:
        """Return a key that is equal for tensors with equal rectangles on equal ranks."""
        ...

    def rotation_period(self, hf_name: str) -> tuple[int, int]:
        """Return how many layers and experts of a tensor's kind the same ranks hold.

        The rotations of these tensors even out what the ranks send.
        """
        ...

    @property
    def fills_tensor_by_tensor(self) -> bool:
        """Whether a target wants to complete one tensor after another instead of slices of many."""
        ...

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every local parameter of a rank."""
        ...

    def fingerprint(self) -> Iterable[str]:
        """Return texts that differ between layouts that place anything differently."""
        ...


def pieces_of(layout: ShardLayout, rank: int) -> Iterator[Shard]:
    """Yield the shards of ``layout`` that ``rank`` holds, tensor by tensor."""
    for hf_name in layout.held_names(rank):
        for shard in layout.shards(hf_name):
            if rank in shard.owner_ranks:
                yield shard


def layer_name(pattern: str, layer: int) -> str:
    """Fill the layer number into a name pattern."""
    return pattern.replace("{l}", str(layer))


def expert_name(pattern: str, expert: int) -> str:
    """Fill the expert number into a name pattern."""
    return pattern.replace("{e}", str(expert))


_DECLARED_BYTES = {"float32": 4}


def element_bytes(declared: str, default: int) -> int:
    """Return the bytes of an element of a declared type; ``default`` where none is declared."""
    return _DECLARED_BYTES.get(declared, default)


_NO_STAGE = -1
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@lru_cache(maxsize=1 << 17)
def locate(hf_name: str) -> tuple[str, int, int]:
    """Split an HF name into pattern, layer and expert: the inverse of filling them in."""
    numbers = [int(text) for text in _NUMBER.findall(hf_name)]
    if not numbers:
        return hf_name, 0, 0
    blanks = iter(("{l}", "{e}"))
    pattern = _NUMBER.sub(lambda match: next(blanks, match[0]), hf_name)
    return pattern, numbers[0], numbers[1] if len(numbers) > 1 else 0


def merge_owner_ranks(several: list[range]) -> list[range]:
    """Merge ranges into one where they interleave into an arithmetic progression."""
    first, count = several[0], len(several)
    if count == 1:
        return several
    starts = [owner_ranks.start for owner_ranks in several]
    gap = starts[1] - starts[0]
    evenly = gap > 0 and starts == list(range(starts[0], starts[0] + gap * count, gap))
    alike = all(h.step == first.step and len(h) == len(first) for h in several)
    if evenly and alike and (gap * count == first.step or len(first) == 1):
        return [range(starts[0], several[-1][-1] + 1, gap)]
    return several


def boxes_kept_twice(found: Iterable[tuple[Cut, list[range]]]) -> set[Box]:
    """Return the rectangles that some rank keeps in two places (redundant experts).

    Their owner ranks are not merged, so that the places of one rank have equal ranges.
    """
    of_box: dict[Box, list[range]] = {}
    for cut, several in found:
        of_box.setdefault(cut.hf_box, []).extend(several)
    return {
        box
        for box, several in of_box.items()
        if len(several) > 1 and len(set().union(*several)) < sum(map(len, several))
    }


@dataclass(frozen=True, slots=True)
class Placed:
    """A share of a row and the ranks that hold it."""

    share: Share
    owner_ranks: range


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """The place of a row at one layer and expert: its local name and the ranks of its shares."""

    param: str
    shares: tuple[Placed, ...]
    is_replica: bool = False


@dataclass(frozen=True)
class TableLayout(ABC):
    """A layout made of rows: the part that trainer and engine have in common.

    Subclasses define which rows exist, where each row lives (:meth:`places`) and what a rank holds
    (:meth:`held_by`). Both are arithmetic, so that nothing costs more than what is asked for.
    """

    spec: ModelSpec

    @property
    @abstractmethod
    def present_rows(self) -> tuple[WeightRow, ...]:
        """The rows that have a parameter in this layout, in the order of the table."""

    @abstractmethod
    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        """Yield the place of a row at a layer and expert, or one place per redundant copy."""

    @abstractmethod
    def params_of(self, row: WeightRow, layer: int, expert: int) -> Sequence[str]:
        """Return the parameters of a row's :meth:`places` at a layer and expert, in their order."""

    @abstractmethod
    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, Sequence[int]]]:
        """Yield row, layer and experts of everything that a rank holds, in table order."""

    @abstractmethod
    def expert_run(self, layer: int, expert: int) -> range:
        """Return the neighbouring experts of a layer that are placed like ``expert``."""

    @abstractmethod
    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        """Return the pipeline stage that holds a row at a layer."""

    @property
    @abstractmethod
    def experts_per_rank(self) -> int:
        """Number of experts of a layer that a rank holds; 0 without experts."""

    def _experts(self, row: WeightRow) -> range:
        return range(self._num_experts) if isinstance(row, ExpertRow) else range(1)

    @cached_property
    def _num_experts(self) -> int:
        return self.spec.num_experts

    def __getstate__(self) -> dict[str, Any]:
        """Keep only the fields: cached values are keyed by the identity of rows."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # The keys are identities of rows: rows live as long as their table.
    @cached_property
    def _first_equals(self) -> dict[int, dict[int, int]]:
        """For each row and layer, the first layer where the row has the same dimensions."""
        return {id(row): row.first_equal_layers(self.spec) for row in self.present_rows}

    @cached_property
    def _spec_at(self) -> dict[int, ModelSpec]:
        """The model specification at each of those first layers."""
        firsts = {first for equals in self._first_equals.values() for first in equals.values()}
        return {layer: self.spec.at(layer) for layer in firsts}

    @cached_property
    def _patterns_of_rows(self) -> dict[tuple[int, int], dict[str, tuple[int, ...]]]:
        """HF name pattern -> shape, for each row and first layer of a kind; ties are resolved."""
        return {
            (id(row), first): {
                row.tied_to if self.spec.tie_embeddings and row.tied_to else pattern: shape
                for pattern, shape in row.hf_shapes(self._spec_at[first]).items()
            }
            for row in self.present_rows
            for first in dict.fromkeys(self._first_equals[id(row)].values())
        }

    def _patterns(self, row: WeightRow, layer: int) -> dict[str, tuple[int, ...]]:
        """Return HF name pattern -> shape of a row at a layer."""
        return self._patterns_of_rows[id(row), self._first_equals[id(row)][layer]]

    @cached_property
    def _rows_of_patterns(self) -> dict[str, dict[int, list[WeightRow]]]:
        """The rows of each HF name pattern and layer: two rows where embeddings are tied."""
        index: dict[str, dict[int, list[WeightRow]]] = {}
        for row in self.present_rows:
            for layer in self._first_equals[id(row)]:
                for pattern in self._patterns(row, layer):
                    index.setdefault(pattern, {}).setdefault(layer, []).append(row)
        return index

    @cached_property
    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            expert_name(layer_name(pattern, layer), expert): shape
            for row in self.present_rows
            for layer in row.layers(self.spec)
            for expert in self._experts(row)
            for pattern, shape in self._patterns(row, layer).items()
        }

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        pattern, layer, _ = locate(hf_name)
        return self._patterns(self._rows_of_patterns[pattern][layer][0], layer)[pattern]

    def dtype_of(self, hf_name: str) -> str:
        pattern, layer, _ = locate(hf_name)
        return self._rows_of_patterns[pattern][layer][0].dtype

    def held_names(self, rank: int) -> list[str]:
        return list(
            dict.fromkeys(
                expert_name(layer_name(pattern, layer), expert)
                for row, layer, experts in self.held_by(rank)
                for expert in experts
                for pattern in self._patterns(row, layer)
            )
        )

    def held_runs(self, rank: int) -> list[tuple[str, range]]:
        return list(
            dict.fromkeys(
                (layer_name(pattern, layer), run)
                for row, layer, experts in self.held_by(rank)
                for run in self._runs(row, layer, experts)
                for pattern in self._patterns(row, layer)
            )
        )

    def _runs(self, row: WeightRow, layer: int, experts: Sequence[int]) -> Iterator[range]:
        run = range(0)
        for expert in experts:
            if expert not in run:
                is_expert = isinstance(row, ExpertRow)
                run = self.expert_run(layer, expert) if is_expert else range(1)
                yield run

    def param_like(self, piece: Piece, hf_name: str) -> str:
        pattern, layer, expert = locate(piece.hf_name)
        rows = self._rows_of_patterns[pattern]
        of_rows = (self.params_of(row, layer, expert) for row in rows[layer])
        number, place = next(
            (number, list(params).index(piece.param))
            for number, params in enumerate(of_rows)
            if piece.param in params
        )
        _, layer, expert = locate(hf_name)
        return self.params_of(rows[layer][number], layer, expert)[place]

    def run_of(self, hf_name: str) -> range:
        pattern, layer, expert = locate(hf_name)
        row = self._rows_of_patterns[pattern][layer][0]
        return self.expert_run(layer, expert) if isinstance(row, ExpertRow) else range(1)

    def units(self) -> Iterator[Unit]:
        for pattern, rows in self._rows_of_patterns.items():
            for layer, (row, *others) in sorted(rows.items()):
                named = layer_name(pattern, layer)
                names = tuple(expert_name(named, expert) for expert in self._experts(row))
                # A tied embedding is on two stages, and must not queue behind the layers of either.
                stage = _NO_STAGE if others else self.pipeline_stage_of(row, layer)
                yield Unit(named, stage, layer, names)

    def unit_of(self, hf_name: str) -> str:
        """Return the key of a tensor's unit: its name without the number of the expert."""
        pattern, layer, _ = locate(hf_name)
        return layer_name(pattern, layer)

    def placement_key(self, hf_name: str) -> Hashable:
        """Return pattern, kind of layer and pipeline stage, which fix the cuts of a row.

        The shape would not do: keys and values are cut apart where more ranks than heads share
        them.
        """
        pattern, layer, _ = locate(hf_name)
        return self._placement_key(pattern, layer)

    def _placement_key(self, pattern: str, layer: int) -> Hashable:
        row = self._rows_of_patterns[pattern][layer][0]
        return pattern, self._first_equals[id(row)][layer], self.pipeline_stage_of(row, layer)

    @cached_property
    def _layers_of_classes(self) -> Counter[Hashable]:
        return Counter(
            self._placement_key(pattern, layer)
            for pattern, rows in self._rows_of_patterns.items()
            for layer in rows
        )

    def rotation_period(self, hf_name: str) -> tuple[int, int]:
        pattern, layer, _ = locate(hf_name)
        is_expert = isinstance(self._rows_of_patterns[pattern][layer][0], ExpertRow)
        num_layers = self._layers_of_classes[self._placement_key(pattern, layer)]
        return num_layers, self.experts_per_rank if is_expert else 1

    @property
    def fills_tensor_by_tensor(self) -> bool:
        """Return false: the parameters are allocated before any tensor arrives."""
        return False

    def _cuts_of(self, row: WeightRow, layer: int, share: Share) -> tuple[Cut, ...]:
        """Return the cuts of a row at a share; experts, like layers and equal cuts share them."""
        first = self._first_equals[id(row)][layer]
        key = (id(row), first, share)
        known = self._cuts_of_rows.get(key)
        if known is None:
            cuts = row.cuts(self._spec_at[first], share)
            known = tuple(self._cuts.setdefault(cut, cut) for cut in cuts)
            self._cuts_of_rows[key] = known
        return known

    @cached_property
    def _cuts_of_rows(self) -> dict[tuple[int, int, Share], tuple[Cut, ...]]:
        return {}

    @cached_property
    def _cuts(self) -> dict[Cut, Cut]:
        return {}

    @cached_property
    def _shards(self) -> dict[str, tuple[Shard, ...]]:
        return {}

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        known = self._shards.get(hf_name)
        if known is None:
            known = tuple(self._make_shards(hf_name))
            self._shards[hf_name] = known
        return known

    def _make_shards(self, hf_name: str) -> Iterator[Shard]:
        found: dict[tuple[int, str, bool], tuple[Cut, list[range]]] = {}
        pattern, layer, expert = locate(hf_name)
        for row in self._rows_of_patterns[pattern][layer]:
            tied = self.spec.tie_embeddings and row.tied_to == pattern
            for place in self.places(row, layer, expert):
                for placed in place.shares:
                    for cut in self._cuts_of(row, layer, placed.share):
                        if tied or cut.hf_name == pattern:
                            key = (id(cut), place.param, place.is_replica)
                            found.setdefault(key, (cut, []))[1].append(placed.owner_ranks)
        kept_twice = boxes_kept_twice(found.values())
        for (_, param, is_replica), (cut, several) in found.items():
            piece = Piece(hf_name, cut.hf_box, param, cut.param_box, cut.view)
            merged = several if cut.hf_box in kept_twice else merge_owner_ranks(several)
            for position, owner_ranks in enumerate(merged):
                yield Shard(piece, owner_ranks, is_replica or position > 0)

    def _parameters(self, rank: int) -> dict[str, tuple[WeightRow, ModelSpec, Share]]:
        """Return row, model at its layer and share of every local parameter, in table order."""
        return {
            place.param: (row, self._spec_at[self._first_equals[id(row)][layer]], placed.share)
            for row, layer, expert in self._held_parameters(rank)
            for place in self.places(row, layer, expert)
            for placed in place.shares
            if rank in placed.owner_ranks
        }

    def _held_parameters(self, rank: int) -> Iterator[tuple[WeightRow, int, int]]:
        """Yield what a rank holds, of a stack of experts the first alone: it is one parameter."""
        for row, layer, experts in self.held_by(rank):
            first = 1 if isinstance(row, StackedExperts) else len(experts)
            yield from ((row, layer, expert) for expert in experts[:first])

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {
            param: row.local_shape(spec, share)
            for param, (row, spec, share) in self._parameters(rank).items()
        }

    def local_bytes(self, rank: int, item_bytes: int) -> dict[str, int]:
        """Return the bytes of local parameters; ``item_bytes`` is the size of the model's type."""
        return {
            param: prod(row.local_shape(spec, share)) * element_bytes(row.dtype, item_bytes)
            for param, (row, spec, share) in self._parameters(rank).items()
        }

    def local_padding(self, rank: int) -> dict[str, int]:
        """Return the declared padding, in elements, of every local parameter of a rank."""
        return {
            param: row.padding(spec, share)
            for param, (row, spec, share) in self._parameters(rank).items()
        }

    def fingerprint(self) -> Iterator[str]:
        yield repr(self)
        yield from map(repr, self.present_rows)

    def check_rows(self, rows: Iterable[WeightRow], count: int) -> None:
        """Refuse a number of tensor-parallel ranks that some row cannot be cut into."""
        for row in rows:
            for layer in dict.fromkeys(row.first_equal_layers(self.spec).values()):
                row.check(self.spec.at(layer), count)
                row.hf_shapes(self.spec.at(layer))
