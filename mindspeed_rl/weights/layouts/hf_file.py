"""A layout in which writers hold every whole HF tensor: the target of an HF export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weights.layouts.base import Piece, Shard, ShardLayout, Unit


@dataclass(frozen=True)
class HfFileLayout:
    """Whole tensors under their HF names on each of ``writers``.

    Args:
        hf_shapes: the tensors, in order of writing.
        writers: the ranks that write files.
        dtypes: element types of tensors that have one of their own, whatever the model's is.
    """

    hf_shapes: Mapping[str, tuple[int, ...]]
    writers: range = range(1)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: ShardLayout, writers: range = range(1)) -> HfFileLayout:
        """The files of the tensors of ``source``, with the element types that it declares."""
        declared = {name: source.dtype_of(name) for name in source.hf_shapes}
        return cls(source.hf_shapes, writers, {n: dtype for n, dtype in declared.items() if dtype})

    def shape_of(self, hf_name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""
        return self.hf_shapes[hf_name]

    def dtype_of(self, hf_name: str) -> str:
        """The declared element type of a tensor; empty: that of the model."""
        return self.dtypes.get(hf_name, "")

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """One shard: the whole tensor."""
        box = Box.whole(self.hf_shapes[hf_name])
        return (Shard(Piece(hf_name, box, hf_name, box), self.writers),)

    @cached_property
    def _num_of_shapes(self) -> Counter[tuple[int, ...]]:
        return Counter(self.hf_shapes.values())

    def num_placed_alike(self, hf_name: str) -> tuple[int, int]:
        """All tensors of a shape."""
        return self._num_of_shapes[self.hf_shapes[hf_name]], 1

    @property
    def wants_whole_tensors(self) -> bool:
        """Yes: what is incomplete takes memory."""
        return True

    def held_names(self, rank: int) -> Iterable[str]:
        """Everything on a writer, nothing elsewhere."""
        return self.hf_shapes if rank in self.writers else ()

    def units(self) -> Iterator[Unit]:
        """Every tensor by itself."""
        return (Unit(name, 0, 0, (name,)) for name in self.hf_shapes)

    def unit_of(self, hf_name: str) -> str:
        """The name itself."""
        return hf_name

    def placement_key(self, hf_name: str) -> Hashable:
        """The shape."""
        return self.hf_shapes[hf_name]

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Everything on a writer, nothing elsewhere."""
        return dict(self.hf_shapes) if rank in self.writers else {}

    def fingerprint(self) -> Iterator[str]:
        """Writers, tensors and their types."""
        yield repr((self.writers, list(self.hf_shapes.items()), sorted(self.dtypes.items())))
