"""Row types of weight tables: how one parameter is cut out of Hugging Face tensors.

A row names a local parameter, the HF tensors whose rectangles it holds, and (by its type) the
tensor-parallel cut. Rows are data: no torch, no process group. ``{l}`` in a name is the layer:
local in the name of the parameter, global in the name of the HF tensor. Dimensions are attribute
names of :class:`~mindspeed_rl.models.spec.ModelSpec`.

The same row types serve the trainer's and the engine's tables; they differ in names, in the fusion
of q, k and v, and in vocabulary padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.resharding.boxes import Box

Stage = Literal["layer", "first", "last"]


def part_name(pattern: str, part: str) -> str:
    """An HF name with its ``{p}`` filled in."""
    return pattern.replace("{p}", part)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rectangle of an HF tensor and where it lies in the local parameter (element units)."""

    hf_name: str
    hf_box: Box
    param_box: Box


@dataclass(frozen=True, slots=True)
class Row(ABC):
    """Base of all rows: ``param`` is the local name, ``stage`` says which pipeline stage holds it.

    ``tied_to`` names the HF tensor that replaces this row's own when embeddings are tied.
    """

    param: str
    stage: Stage = "layer"
    tied_to: str | None = None

    @abstractmethod
    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """HF name pattern -> shape of the whole tensor."""

    @abstractmethod
    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """Shape of the parameter on one of ``count`` tensor-parallel ranks."""

    @abstractmethod
    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """The rectangles that tensor-parallel rank ``index`` of ``count`` holds."""

    def check(self, spec: ModelSpec, count: int) -> None:  # noqa: B027 - most rows need no more
        """Raise ``ValueError`` when ``count`` tensor-parallel ranks cannot share this row."""


def _span(total: int, index: int, count: int, what: str) -> tuple[int, int]:
    """Start and length of an even share."""
    if total % count:
        raise ValueError(
            f"--tensor-model-parallel-size or --rollout-tp {count} does not divide the model's "
            f"{what} = {total}; allowed: the divisors of {total}"
        )
    size = total // count
    return index * size, size


@dataclass(frozen=True, slots=True)
class Replicated(Row):
    """The whole tensor on every tensor-parallel rank."""

    hf: str = ""
    dims: tuple[str, ...] = ("hidden_size",)

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """One tensor."""
        return {self.hf: spec.dims(self.dims)}

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """The whole shape."""
        return spec.dims(self.dims)

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """One rectangle: everything."""
        box = Box.whole(spec.dims(self.dims))
        yield Cut(self.hf, box, box)


@dataclass(frozen=True, slots=True)
class Split(Row):
    """One tensor cut evenly along ``dim``: 0 for column-parallel, 1 for row-parallel linears."""

    hf: str = ""
    dims: tuple[str, ...] = ()
    dim: int = 0

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """One tensor."""
        return {self.hf: spec.dims(self.dims)}

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """The shape with ``dim`` divided."""
        return next(self.cuts(spec, 0, count, vocab_multiple)).param_box.size

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """One slab."""
        shape = spec.dims(self.dims)
        start, size = _span(shape[self.dim], index, count, self.dims[self.dim])
        box = Box.whole(shape).with_dim(self.dim, start, size)
        yield Cut(self.hf, box, Box.whole(box.size))


@dataclass(frozen=True, slots=True)
class Vocab(Row):
    """A ``[vocab, hidden]`` matrix cut along the vocabulary, padded to ``vocab_multiple`` rows.

    Rows past the vocabulary are padding: they are declared by being covered by no cut.
    """

    hf: str = ""

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """One tensor."""
        return {self.hf: (spec.vocab_size, spec.hidden_size)}

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """Padded rows per rank, hidden."""
        return padded_vocab(spec.vocab_size, vocab_multiple) // count, spec.hidden_size

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """At most one slab: the real rows of this rank's share."""
        padded = padded_vocab(spec.vocab_size, vocab_multiple)
        start, size = _span(padded, index, count, "the padded vocabulary")
        size = min(size, spec.vocab_size - start)
        if size > 0:
            hf_box = Box((start, 0), (size, spec.hidden_size))
            yield Cut(self.hf, hf_box, Box((0, 0), hf_box.size))


@dataclass(frozen=True, slots=True)
class GateUp(Row):
    """``[gate; up]`` of a gated MLP, each cut along its rows and then stacked on each rank.

    ``{p}`` in ``hf`` stands for ``gate`` and ``up``.
    """

    hf: str = ""
    dims: tuple[str, str] = ("ffn_hidden_size", "hidden_size")

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Two tensors of equal shape."""
        shape = spec.dims(self.dims)
        return {part_name(self.hf, part): shape for part in ("gate", "up")}

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """``[2 ffn / count, hidden]``."""
        ffn, hidden = spec.dims(self.dims)
        return 2 * _span(ffn, 0, count, self.dims[0])[1], hidden

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """One slab of each."""
        ffn, hidden = spec.dims(self.dims)
        start, size = _span(ffn, index, count, self.dims[0])
        for offset, part in ((0, "gate"), (size, "up")):
            name = part_name(self.hf, part)
            yield Cut(name, Box((start, 0), (size, hidden)), Box((offset, 0), (size, hidden)))


@dataclass(frozen=True, slots=True)
class QKV(Row):
    """Base of fused projections; ``bias`` rows have one dimension.

    ``{p}`` in ``hf`` stands for ``q``, ``k`` and ``v``.
    """

    hf: str = ""
    bias: bool = False

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Three tensors."""
        tail = () if self.bias else (spec.hidden_size,)
        rows = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
        return {part_name(self.hf, part): (size, *tail) for part, size in rows.items()}

    def _cut(self, spec: ModelSpec, part: str, hf_row: int, row: int, size: int) -> Cut:
        name = part_name(self.hf, part)
        zero, width = ((), ()) if self.bias else ((0,), (spec.hidden_size,))
        return Cut(name, Box((hf_row, *zero), (size, *width)), Box((row, *zero), (size, *width)))

    def _shape(self, spec: ModelSpec, rows: int) -> tuple[int, ...]:
        return (rows,) if self.bias else (rows, spec.hidden_size)


@dataclass(frozen=True, slots=True)
class GroupedQKV(QKV):
    """Megatron's interleave: per key/value head its query heads, then its key, then its value."""

    def check(self, spec: ModelSpec, count: int) -> None:
        """Whole key/value groups per rank."""
        if spec.num_kv_heads % count:
            raise ValueError(
                f"--tensor-model-parallel-size {count} does not divide the model's "
                f"{spec.num_kv_heads} key/value heads; allowed: the divisors of "
                f"{spec.num_kv_heads}"
            )

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """``[(q + 2 kv) / count, hidden]``."""
        self.check(spec, count)
        return self._shape(spec, (spec.q_size + 2 * spec.kv_size) // count)

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """Three rectangles per key/value head of this rank."""
        self.check(spec, count)
        head = spec.head_dim
        q_rows = spec.num_heads // spec.num_kv_heads * head
        first, groups = _span(spec.num_kv_heads, index, count, "num_kv_heads")
        for local in range(groups):
            group, base = first + local, local * (q_rows + 2 * head)
            yield self._cut(spec, "q", group * q_rows, base, q_rows)
            yield self._cut(spec, "k", group * head, base + q_rows, head)
            yield self._cut(spec, "v", group * head, base + q_rows + head, head)


@dataclass(frozen=True, slots=True)
class StackedQKV(QKV):
    """vLLM's order ``[q; k; v]``; key/value heads are replicated when there are more ranks."""

    def check(self, spec: ModelSpec, count: int) -> None:
        """vLLM's own rule: query heads divide; kv heads divide or are divided."""
        kv = spec.num_kv_heads
        if spec.num_heads % count or (kv % count and count % kv):
            raise ValueError(
                f"--rollout-tp {count} does not fit the model's {spec.num_heads} attention heads "
                f"and {kv} key/value heads; it must divide the first, and divide or be a multiple "
                "of the second"
            )

    def _kv(self, spec: ModelSpec, index: int, count: int) -> tuple[int, int]:
        """First key/value head and number of them on a rank."""
        if count <= spec.num_kv_heads:
            return _span(spec.num_kv_heads, index, count, "num_kv_heads")
        return index // (count // spec.num_kv_heads), 1

    def local_shape(self, spec: ModelSpec, count: int, vocab_multiple: int) -> tuple[int, ...]:
        """``[q / count + 2 kv_local, hidden]``."""
        self.check(spec, count)
        heads = spec.num_heads // count + 2 * self._kv(spec, 0, count)[1]
        return self._shape(spec, heads * spec.head_dim)

    def cuts(self, spec: ModelSpec, index: int, count: int, vocab_multiple: int) -> Iterator[Cut]:
        """Three rectangles."""
        self.check(spec, count)
        head = spec.head_dim
        q_start, q_rows = _span(spec.q_size, index, count, "q_size")
        first, heads = self._kv(spec, index, count)
        yield self._cut(spec, "q", q_start, 0, q_rows)
        yield self._cut(spec, "k", first * head, q_rows, heads * head)
        yield self._cut(spec, "v", first * head, q_rows + heads * head, heads * head)


def padded_vocab(vocab_size: int, multiple: int) -> int:
    """The vocabulary rounded up to a multiple."""
    return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class WeightTable:
    """All rows of a family on both sides, keyed by HF tensor names.

    ``trainer`` rows use megatron-core's parameter names, ``engine`` rows vLLM's.
    """

    family: str
    architectures: tuple[str, ...]
    trainer: tuple[Row, ...]
    engine: tuple[Row, ...]
