"""A layout in which writers hold every whole HF tensor: the target of an HF export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.layouts.base import Piece, Shard


@dataclass(frozen=True)
class HfFileLayout:
    """Whole tensors under their HF names on each of ``writers``.

    Args:
        hf_shapes: the tensors, in order of writing.
        writers: the ranks that write files.
    """

    hf_shapes: Mapping[str, tuple[int, ...]]
    writers: range = range(1)

    def dtype_of(self, hf_name: str) -> str:
        """The writer decides."""
        return ""

    def shards(self, hf_name: str) -> tuple[Shard, ...]:
        """One shard: the whole tensor."""
        box = Box.whole(self.hf_shapes[hf_name])
        return (Shard(Piece(hf_name, box, hf_name, box), self.writers),)

    def local_shapes(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """Everything on a writer, nothing elsewhere."""
        return dict(self.hf_shapes) if rank in self.writers else {}
