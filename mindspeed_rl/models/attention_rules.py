"""Rows of attention: projections cut by heads, fused as the trainer or the engine stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.layers import GroupedQueryAttention
from mindspeed_rl.models.rules import Cut, Share, Split, WeightRow, even_span, part_name
from mindspeed_rl.models.spec import ModelSpec


def _grouped(spec: ModelSpec) -> GroupedQueryAttention:
    attention = spec.attention
    assert isinstance(attention, GroupedQueryAttention), "rows of queries, keys and values"
    return attention


@dataclass(frozen=True, slots=True)
class QKV(WeightRow):
    """Base class of fused query, key and value projections; ``bias`` rows have one dimension."""

    hf: str = ""
    bias: bool = False

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        tail = () if self.bias else (spec.hidden_size,)
        attention = _grouped(spec)
        rows = {"q": attention.q_size, "k": attention.kv_size, "v": attention.kv_size}
        return {part_name(self.hf, part): (size, *tail) for part, size in rows.items()}

    def _cut(self, spec: ModelSpec, part: str, hf_row: int, row: int, size: int) -> Cut:
        name = part_name(self.hf, part)
        zero, width = ((), ()) if self.bias else ((0,), (spec.hidden_size,))
        return Cut(name, Box((hf_row, *zero), (size, *width)), Box((row, *zero), (size, *width)))

    def _shape(self, spec: ModelSpec, rows: int) -> tuple[int, ...]:
        return (rows,) if self.bias else (rows, spec.hidden_size)


@dataclass(frozen=True, slots=True)
class GroupedQKV(QKV):
    """Megatron's interleaved rows: per key/value head its query heads, then its key and its value.

    Ranks hold equal runs of these rows. With more ranks than key/value heads a run is a part of a
    group; megatron-core gathers the rows of the activations then.
    """

    def check(self, spec: ModelSpec, count: int) -> None:
        """Check Megatron's rule: ranks divide the kv heads or the reverse, and divide the rows."""
        kv, rows = _grouped(spec).num_kv_heads, self._rows(spec)
        if (kv % count and count % kv) or rows % count:
            raise UsageError(
                f"--tensor-model-parallel-size {count} does not fit the model's {kv} key/value "
                "heads; allowed: their divisors, and multiples that divide the query heads and "
                f"the {rows} rows of queries, keys and values"
            )

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[(q + 2 kv) / count, hidden]``."""
        self.check(spec, share.tp_size)
        return self._shape(spec, self._rows(spec) // share.tp_size)

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        """Up to three rectangles per key/value head of this rank."""
        self.check(spec, share.tp_size)
        rows = self._rows(spec) // share.tp_size
        first = share.tp * rows
        for part, hf_row, start, size in self._runs(spec):
            low, high = max(start, first), min(start + size, first + rows)
            if low < high:
                yield self._cut(spec, part, hf_row + low - start, low - first, high - low)

    @staticmethod
    def _rows(spec: ModelSpec) -> int:
        """Number of rows of the whole fused tensor."""
        attention = _grouped(spec)
        return attention.q_size + 2 * attention.kv_size

    @staticmethod
    def _runs(spec: ModelSpec) -> Iterator[tuple[str, int, int, int]]:
        """Yield runs of rows: part, first row in HF, first row in the fused tensor, length."""
        attention = _grouped(spec)
        head, kv_heads = attention.head_dim, attention.num_kv_heads
        q_rows = attention.num_heads // kv_heads * head
        for group in range(kv_heads):
            base = group * (q_rows + 2 * head)
            yield "q", group * q_rows, base, q_rows
            yield "k", group * head, base + q_rows, head
            yield "v", group * head, base + q_rows + head, head


@dataclass(frozen=True, slots=True)
class StackedQKV(QKV):
    """Rows in vLLM's order ``[q; k; v]``; more ranks than key/value heads hold copies of those."""

    def check(self, spec: ModelSpec, count: int) -> None:
        """Check vLLM's rule: ranks divide the query heads, and divide kv heads or the reverse."""
        heads, kv = _grouped(spec).num_heads, _grouped(spec).num_kv_heads
        if heads % count or (kv % count and count % kv):
            raise UsageError(
                f"--rollout-tp {count} does not fit the model's {heads} attention heads "
                f"and {kv} key/value heads; it must divide the first, and divide or be a multiple "
                "of the second"
            )

    def _kv(self, num_kv_heads: int, index: int, count: int) -> tuple[int, int]:
        """The first key/value head on a rank and the number of its key/value heads."""
        if count <= num_kv_heads:
            return even_span(num_kv_heads, index, count, "num_kv_heads")
        return index // (count // num_kv_heads), 1

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[q / count + 2 kv_local, hidden]``."""
        self.check(spec, share.tp_size)
        attention, count = _grouped(spec), share.tp_size
        heads = attention.num_heads // count + 2 * self._kv(attention.num_kv_heads, 0, count)[1]
        return self._shape(spec, heads * attention.head_dim)

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        self.check(spec, share.tp_size)
        attention = _grouped(spec)
        head = attention.head_dim
        q_start, q_rows = even_span(attention.q_size, share.tp, share.tp_size, "q_size")
        first, heads = self._kv(attention.num_kv_heads, share.tp, share.tp_size)
        yield self._cut(spec, "q", q_start, 0, q_rows)
        yield self._cut(spec, "k", first * head, q_rows, heads * head)
        yield self._cut(spec, "v", first * head, q_rows + heads * head, heads * head)


@dataclass(frozen=True, slots=True)
class HeadSplit(Split):
    """A :class:`Split` whose shares are whole attention heads."""

    def check(self, spec: ModelSpec, count: int) -> None:
        heads = spec.attention.num_heads
        if heads % count:
            raise UsageError(
                f"--tensor-model-parallel-size or --rollout-tp {count} does not divide the model's "
                f"{heads} attention heads; allowed: the divisors of {heads}"
            )


@dataclass(frozen=True, slots=True)
class HeadPart(HeadSplit):
    """A matrix with the same channels of every head of a projection, head below head.

    ``hf`` is the whole projection, ``dims`` its dimensions. Latent attention with
    ``--mla-mm-split`` keeps the two parts of its up projections in matrices of their own.

    Attributes:
        sizes: Attributes of :class:`~mindspeed_rl.models.layers.LatentAttention` with the channels
            of each part of a head, in order.
        part: Index in ``sizes`` of the part that this row keeps.
    """

    sizes: tuple[str, str] = ("", "")
    part: int = 0

    def _channels(self, spec: ModelSpec) -> tuple[int, int, int]:
        """Channels of a head, the first channel that is kept, and how many channels are kept."""
        first, second = spec.dims(self.sizes)
        return first + second, first * self.part, second if self.part else first

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[heads / count * channels, columns]``."""
        self.check(spec, share.tp_size)
        heads = spec.attention.num_heads // share.tp_size
        return heads * self._channels(spec)[2], spec.dims(self.dims)[1]

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        """One rectangle per head of this rank."""
        self.check(spec, share.tp_size)
        whole, first, kept = self._channels(spec)
        columns = spec.dims(self.dims)[1]
        start, heads = even_span(spec.attention.num_heads, share.tp, share.tp_size, "num_heads")
        for head in range(heads):
            hf_box = Box(((start + head) * whole + first, 0), (kept, columns))
            yield Cut(self.hf, hf_box, Box((head * kept, 0), (kept, columns)))
