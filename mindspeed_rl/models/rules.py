"""Row types of weight tables: how one parameter is cut out of Hugging Face tensors.

A row names a local parameter, the HF tensors whose rectangles it holds, and (by its type) the
tensor-parallel or expert-parallel cut. Rows are data: no torch, no process group. In names, ``{l}``
is the layer and ``{e}`` the expert: local in the name of the parameter, global in the name of the
HF tensor. Dimensions and conditions are attribute names of
:class:`~mindspeed_rl.models.spec.ModelSpec` and of the parts of its layers
(:mod:`~mindspeed_rl.models.layers`).

A model may have layers of several kinds: a row belongs to the layers of its kind, and methods that
need dimensions are called with the model at one of these layers (``ModelSpec.at``).

The same row types serve the trainer's and the engine's tables; they differ in names, in fusions, in
the storage of experts and in padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from mindspeed_rl.core.boxes import PLAIN, Box, ParamView
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.models.layers import MLP, Attention
from mindspeed_rl.models.spec import ModelSpec

# "layer": every layer; "grouped" and "latent", "dense" and "moe": layers with that kind of
# attention or MLP only; "mtp": layers of multi-token prediction, which follow the layers of the
# model and live on its last stage.
Stage = Literal["layer", "grouped", "latent", "dense", "moe", "first", "last", "mtp"]


def part_name(pattern: str, part: str) -> str:
    """The HF name with its ``{p}`` replaced by ``part``."""
    return pattern.replace("{p}", part)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a row that a rank holds.

    Attributes:
        tp: Position of the rank among the ranks that cut the matrix.
        tp_size: Number of ranks that cut the matrix.
        expert: Number of the local expert, for rows of experts.
        num_local_experts: Number of experts on the rank, for rows of experts.
        multiple: Rows of a vocabulary, over all ranks, or channels of an expert, on each rank, are
            padded to a multiple of this.
    """

    tp: int = 0
    tp_size: int = 1
    expert: int = 0
    num_local_experts: int = 1
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class Cut:
    """One rectangle of an HF tensor and where it lies in the local parameter (element units).

    ``param_box`` is a rectangle of ``view``, which may be a part of the parameter.
    """

    hf_name: str
    hf_box: Box
    param_box: Box
    view: ParamView = PLAIN


@dataclass(frozen=True, slots=True)
class WeightRow(ABC):
    """Base class of the rows of weight tables.

    Attributes:
        param: Name of the local parameter.
        stage: Layers or pipeline stage that have this row.
        tied_to: HF tensor that replaces this row's own when embeddings are tied.
        when: Attribute that must be true for the row to exist: of the spec, or of the attention or
            MLP of a layer; empty: the row always exists.
        dtype: Element type on both sides; empty: that of the model.
    """

    param: str
    stage: Stage = "layer"
    tied_to: str | None = None
    when: str = ""
    dtype: str = ""

    @abstractmethod
    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Map every HF name pattern of the row to the shape of the whole tensor."""

    @abstractmethod
    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """Shape of the parameter on a rank."""

    @abstractmethod
    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        """The rectangles of HF tensors that a rank holds."""

    def check(self, spec: ModelSpec, count: int) -> None:  # noqa: B027 - most rows need no more
        """Raise ``UsageError`` when ``count`` tensor-parallel ranks cannot share this row."""

    def layers(self, spec: ModelSpec) -> tuple[int, ...]:
        """Numbers of the layers that have this row; the single 0 for rows outside the layers."""
        if self.stage in ("first", "last"):
            return (0,) if not self.when or getattr(spec, self.when) else ()
        if self.stage == "mtp":
            return tuple(range(spec.num_layers, spec.num_layers + spec.num_mtp_layers))
        parts = ((n, self._part(spec, n)) for n in range(spec.num_layers))
        return tuple(
            n
            for n, part in parts
            if self.stage in ("layer", part.kind) and (not self.when or getattr(part, self.when))
        )

    def _part(self, spec: ModelSpec, layer: int) -> Attention | MLP:
        """The part of a layer that gives the dimensions and the condition of this row."""
        at = spec.layer(layer)
        return at.mlp if self.stage in ("dense", "moe") else at.attention

    def first_equal_layers(self, spec: ModelSpec) -> dict[int, int]:
        """Map every layer that has this row to the first one whose dimensions are the same."""
        first: dict[Attention | MLP, int] = {}
        return {n: first.setdefault(self._part(spec, n), n) for n in self.layers(spec)}

    def padding(self, spec: ModelSpec, share: Share) -> int:
        """Number of elements of the parameter on a rank that belong to no HF tensor."""
        return 0


def even_span(total: int, index: int, count: int, what: str) -> tuple[int, int]:
    """Start and length of share ``index`` of ``count`` equal shares."""
    if total % count:
        raise UsageError(
            f"--tensor-model-parallel-size or --rollout-tp {count} does not divide the model's "
            f"{what} = {total}; allowed: the divisors of {total}"
        )
    size = total // count
    return index * size, size


@dataclass(frozen=True, slots=True)
class Replicated(WeightRow):
    """The whole tensor on every tensor-parallel rank."""

    hf: str = ""
    dims: tuple[str, ...] = ("hidden_size",)

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {self.hf: spec.dims(self.dims)}

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        return spec.dims(self.dims)

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        box = Box.whole(spec.dims(self.dims))
        yield Cut(self.hf, box, box)


@dataclass(frozen=True, slots=True)
class Split(WeightRow):
    """One tensor cut evenly along ``dim``: 0 for column-parallel, 1 for row-parallel linears."""

    hf: str = ""
    dims: tuple[str, ...] = ()
    dim: int = 0

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {self.hf: spec.dims(self.dims)}

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """The shape with ``dim`` divided, and padded where the share says so."""
        shape = spec.dims(self.dims)
        size = even_span(shape[self.dim], 0, share.tp_size, self.dims[self.dim])[1]
        return (*shape[: self.dim], round_up(size, share.multiple), *shape[self.dim + 1 :])

    def padding(self, spec: ModelSpec, share: Share) -> int:
        shape = spec.dims(self.dims)
        size = even_span(shape[self.dim], 0, share.tp_size, self.dims[self.dim])[1]
        return (-size % share.multiple) * (prod(shape) // shape[self.dim])

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        shape = spec.dims(self.dims)
        start, size = even_span(shape[self.dim], share.tp, share.tp_size, self.dims[self.dim])
        box = Box.whole(shape).with_dim(self.dim, start, size)
        yield Cut(self.hf, box, Box.whole(box.size))


@dataclass(frozen=True, slots=True)
class Vocab(WeightRow):
    """A ``[vocab, hidden]`` matrix cut along the vocabulary, padded to a multiple of rows.

    Rows past the vocabulary are padding: no cut covers them.
    """

    hf: str = ""

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {self.hf: (spec.vocab_size, spec.hidden_size)}

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[padded vocabulary / count, hidden]``."""
        rows = round_up(spec.vocab_size, share.multiple)
        return even_span(rows, 0, share.tp_size, "the padded vocabulary")[1], spec.hidden_size

    def padding(self, spec: ModelSpec, share: Share) -> int:
        """Number of elements in the rows past the vocabulary."""
        rows = self.local_shape(spec, share)[0]
        real = min(max(spec.vocab_size - share.tp * rows, 0), rows)
        return (rows - real) * spec.hidden_size

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        """At most one rectangle: the rows of this rank's share that are not padding."""
        padded = round_up(spec.vocab_size, share.multiple)
        start, size = even_span(padded, share.tp, share.tp_size, "the padded vocabulary")
        size = min(size, spec.vocab_size - start)
        if size > 0:
            hf_box = Box((start, 0), (size, spec.hidden_size))
            yield Cut(self.hf, hf_box, Box((0, 0), hf_box.size))


@dataclass(frozen=True, slots=True)
class GateUp(WeightRow):
    """``[gate; up]`` of a gated MLP, each cut along its rows and then stacked on each rank.

    ``{p}`` in ``hf`` stands for ``gate`` and ``up``.
    """

    hf: str = ""
    dims: tuple[str, str] = ("ffn_hidden_size", "hidden_size")

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        shape = spec.dims(self.dims)
        return {part_name(self.hf, part): shape for part in ("gate", "up")}

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[2 ffn / count, hidden]``, each half padded where the share says so."""
        ffn, hidden = spec.dims(self.dims)
        size = even_span(ffn, 0, share.tp_size, self.dims[0])[1]
        return 2 * round_up(size, share.multiple), hidden

    def padding(self, spec: ModelSpec, share: Share) -> int:
        ffn, hidden = spec.dims(self.dims)
        size = even_span(ffn, 0, share.tp_size, self.dims[0])[1]
        return 2 * (-size % share.multiple) * hidden

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        ffn, hidden = spec.dims(self.dims)
        start, size = even_span(ffn, share.tp, share.tp_size, self.dims[0])
        for offset, part in ((0, "gate"), (round_up(size, share.multiple), "up")):
            name = part_name(self.hf, part)
            yield Cut(name, Box((start, 0), (size, hidden)), Box((offset, 0), (size, hidden)))


@dataclass(frozen=True, slots=True)
class Joined(WeightRow):
    """Several whole HF tensors with equal columns, stacked along their rows, on every rank."""

    parts: tuple[tuple[str, str], ...] = ()
    columns: str = "hidden_size"

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {name: spec.dims((rows, self.columns)) for name, rows in self.parts}

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        shapes = self.hf_shapes(spec).values()
        return sum(shape[0] for shape in shapes), spec.dims((self.columns,))[0]

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        start = 0
        for name, shape in self.hf_shapes(spec).items():
            yield Cut(name, Box.whole(shape), Box((start, 0), shape))
            start += shape[0]


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one part of a model for the trainer and for the engines.

    Attributes:
        trainer: Rows under megatron-core's parameter names.
        engines: Rows under each kind of engine's own parameter names, by the name of the kind.
    """

    trainer: tuple[WeightRow, ...]
    engines: Mapping[str, tuple[WeightRow, ...]]


@dataclass(frozen=True, slots=True)
class WeightTable:
    """All rows of a model family.

    ``config_keys`` are keys of config.json with their values that exports always hold: every model
    of the family has them, and some reader guesses wrongly where they are absent.
    """

    family: str
    architectures: tuple[str, ...]
    blocks: tuple[Block, ...]
    config_keys: tuple[tuple[str, str], ...] = ()

    def trainer_rows(self, spec: ModelSpec) -> tuple[WeightRow, ...]:
        """The rows that the trainer has for a model of this spec."""
        return tuple(r for block in self.blocks for r in block.trainer if r.layers(spec))

    def engine_rows(self, spec: ModelSpec, engine: str) -> tuple[WeightRow, ...]:
        """The rows that an engine of a kind has for a model of this spec."""
        return tuple(r for block in self.blocks for r in block.engines[engine] if r.layers(spec))
