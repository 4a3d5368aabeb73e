"""Where megatron-core keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.rules import Row, Share
from mindspeed_rl.parallel.layout import ParallelLayout
from mindspeed_rl.parallel.stages import Place
from mindspeed_rl.resharding.layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)


def chunk_prefix(chunk: int, num_chunks: int) -> str:
    """Prefix of the parameter names of a chunk of an interleaved pipeline."""
    return f"chunk{chunk}." if num_chunks > 1 else ""


@dataclass(frozen=True)
class MegatronLayout(TableLayout):
    """Tensor, pipeline, expert, context and data parallel layout of the trainer.

    Local parameter names count layers and experts from 0 on every rank, as megatron-core does;
    chunks of an interleaved pipeline have a prefix. With tied embeddings and several stages the
    last one keeps a mirror of the embedding.
    """

    parallel: ParallelLayout
    vocab_divisor: int = 128

    def __post_init__(self) -> None:
        rows, parallel = self.rows, self.parallel
        self.check_rows((r for r in rows if not isinstance(r, ExpertRow)), parallel.tp)
        self.check_rows((r for r in rows if isinstance(r, ExpertRow)), parallel.etp)
        if self.spec.num_experts % parallel.ep:
            raise ValueError(
                f"--expert-model-parallel-size {parallel.ep} does not divide the model's "
                f"{self.spec.num_experts} experts; allowed: the divisors of "
                f"{self.spec.num_experts}"
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """The trainer's rows of the model."""
        return weight_table(self.spec.family).trainer_rows(self.spec)

    @property
    def vocab_multiple(self) -> int:
        """``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
        return self.vocab_divisor * self.parallel.tp

    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer and expert."""
        stages = self.parallel.stages
        last = Place(stages.pp - 1, stages.vpp - 1, 0)
        for row in self.rows:
            mirror = bool(self.spec.tie_embeddings and row.tied_to)
            if mirror and stages.pp == 1:
                continue
            if row.stage in ("first", "last"):
                place = Place(0, 0, 0) if row.stage == "first" else last
                yield self._dense(row, 0, place, mirror)
                continue
            for layer in row.layers(self.spec):
                if isinstance(row, ExpertRow):
                    yield from self._experts(row, layer, stages.place_of(layer))
                else:
                    yield self._dense(row, layer, stages.place_of(layer))

    def _name(self, row: Row, place: Place) -> str:
        prefix = chunk_prefix(place.chunk, self.parallel.stages.vpp)
        return prefix + layer_name(row.param, place.local)

    def _dense(self, row: Row, layer: int, place: Place, mirror: bool = False) -> RowPlacement:
        parallel = self.parallel
        multiple = self.vocab_multiple if row.stage in ("first", "last") else 1
        shares = tuple(
            Placed(Share(tp, parallel.tp, multiple=multiple), parallel.replicas(tp, place.stage))
            for tp in range(parallel.tp)
        )
        return RowPlacement(row, layer, 0, self._name(row, place), shares, mirror)

    def _experts(self, row: ExpertRow, layer: int, place: Place) -> Iterator[RowPlacement]:
        parallel = self.parallel
        per_rank = self.spec.num_experts // parallel.ep
        for expert in range(self.spec.num_experts):
            ep, local = divmod(expert, per_rank)
            shares = tuple(
                Placed(
                    Share(etp, parallel.etp, local, per_rank),
                    parallel.expert_replicas(etp, ep, place.stage),
                )
                for etp in range(parallel.etp)
            )
            name = expert_name(self._name(row, place), local)
            yield RowPlacement(row, layer, expert, name, shares)
