"""A layout in which writers hold every whole HF tensor: the target of an HF export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weight_layouts.base import (
    Piece,
    Shard,
    ShardLayout,
    Unit,
    layer_name,
    locate,
)


@dataclass(frozen=True)
class HfFileLayout:
    """Whole tensors under their HF names on each of ``writers``.

    Args:
        hf_shapes: Whole shapes of the tensors, in order of writing.
        writers: Ranks that write files.
        dtypes: Element types of the tensors that declare one, independent of the model's type.
    """

    hf_shapes: Mapping[str, tuple[int, ...]]
    writers: range = range(1)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: ShardLayout, writers: range = range(1)) -> HfFileLayout:
        """Make the layout of all tensors of ``source``, with the element types that it declares."""
        declared = {name: source.dtype_of(name) for name in source.hf_shapes}
        return cls(source.hf_shapes, writers, {n: dtype for n, dtype in declared.items() if dtype})

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        return self.hf_shapes[hf_name]

    def dtype_of(self, hf_name: str) -> str:
        return self.dtypes.get(hf_name, "")

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        box = Box.whole(self.hf_shapes[hf_name])
        return (Shard(Piece(hf_name, box, hf_name, box), self.writers),)

    @cached_property
    def _num_of_shapes(self) -> Counter[tuple[int, ...]]:
        return Counter(self.hf_shapes.values())

    def rotation_period(self, hf_name: str) -> tuple[int, int]:
        """Return the number of tensors of the same shape."""
        return self._num_of_shapes[self.hf_shapes[hf_name]], 1

    @property
    def fills_tensor_by_tensor(self) -> bool:
        """Return true: tensors that are not complete yet take memory."""
        return True

    def held_names(self, rank: int) -> Iterable[str]:
        return self.hf_shapes if rank in self.writers else ()

    def held_runs(self, rank: int) -> Iterator[tuple[str, range]]:
        for name in self.held_names(rank):
            pattern, layer, _ = locate(name)
            yield layer_name(pattern, layer), self.run_of(name)

    def param_like(self, piece: Piece, hf_name: str) -> str:
        return hf_name

    def run_of(self, hf_name: str) -> range:
        """Return the expert alone: every tensor has a parameter and a place in the file."""
        expert = locate(hf_name)[2]
        return range(expert, expert + 1)

    def units(self) -> Iterator[Unit]:
        """Return every tensor as a unit of its own."""
        return (Unit(name, 0, 0, (name,)) for name in self.hf_shapes)

    def unit_of(self, hf_name: str) -> str:
        return hf_name

    def placement_key(self, hf_name: str) -> Hashable:
        return self.hf_shapes[hf_name]

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        return dict(self.hf_shapes) if rank in self.writers else {}

    def fingerprint(self) -> Iterator[str]:
        yield repr((self.writers, list(self.hf_shapes.items()), sorted(self.dtypes.items())))
