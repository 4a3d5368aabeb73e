"""Rows of routed experts: one parameter per expert, or all local experts stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.core.boxes import ParamView
from mindspeed_rl.models.rules import Cut, Share, WeightRow
from mindspeed_rl.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertRow(WeightRow):
    """Base class of the rows of routed experts: ``inner`` describes the matrix of one expert.

    Expert parallelism distributes the experts, and expert tensor parallelism cuts each of them; the
    layout knows both and passes the local expert in the share.
    """

    inner: WeightRow | None = None

    @property
    def matrix(self) -> WeightRow:
        """The row that describes the matrix of one expert."""
        assert self.inner is not None, f"{self.param}: a row of experts needs an inner row"
        return self.inner

    def hf_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """The shapes of one expert's tensors, with ``{e}`` in their names."""
        return self.matrix.hf_shapes(spec)

    def check(self, spec: ModelSpec, count: int) -> None:
        self.matrix.check(spec, count)

    def padding(self, spec: ModelSpec, share: Share) -> int:
        return self.matrix.padding(spec, share)


@dataclass(frozen=True, slots=True)
class PerExpert(ExpertRow):
    """One parameter per local expert; ``{e}`` in ``param`` is its number."""

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        return self.matrix.local_shape(spec, share)

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        return self.matrix.cuts(spec, share)


@dataclass(frozen=True, slots=True)
class StackedExperts(ExpertRow):
    """One parameter for all local experts, stacked along dimension 0.

    ``transposed`` storage keeps each matrix as [columns, rows].
    """

    transposed: bool = False

    def local_shape(self, spec: ModelSpec, share: Share) -> tuple[int, ...]:
        """``[local experts, rows, columns]``, the last two swapped where transposed."""
        rows, columns = self.matrix.local_shape(spec, share)
        matrix = (columns, rows) if self.transposed else (rows, columns)
        return (share.num_local_experts, *matrix)

    def padding(self, spec: ModelSpec, share: Share) -> int:
        return share.num_local_experts * self.matrix.padding(spec, share)

    def cuts(self, spec: ModelSpec, share: Share) -> Iterator[Cut]:
        """The rectangles of one expert, placed inside the stack."""
        view = ParamView((share.expert,), self.transposed)
        for cut in self.matrix.cuts(spec, share):
            yield replace(cut, view=view)
