"""The layout of megatron-core: where the trainer keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import LayerPlace
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.param_names import LOCAL, ParamNames
from mindspeed_rl.models.rules import Share, WeightRow
from mindspeed_rl.weight_layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)


def chunk_prefix(chunk: int, num_chunks: int) -> str:
    """Return the prefix of the parameter names of a chunk of an interleaved pipeline."""
    return f"chunk{chunk}." if num_chunks > 1 else ""


@dataclass(frozen=True)
class MegatronLayout(TableLayout):
    """Tensor, pipeline, expert, context and data parallel layout of the trainer.

    Local parameter names count layers and experts from 0 on every rank, as megatron-core does;
    chunks of an interleaved pipeline have a prefix. ``modules`` gives the parameter names of the
    layers' implementation. With tied embeddings and several stages the last stage keeps a replica
    of the embedding.
    """

    parallel: ParallelLayout
    vocab_divisor: int = 128
    modules: ParamNames = LOCAL

    def __post_init__(self) -> None:
        rows, parallel = self.rows, self.parallel
        self.check_rows((r for r in rows if not isinstance(r, ExpertRow)), parallel.tp)
        self.check_rows((r for r in rows if isinstance(r, ExpertRow)), parallel.etp)
        if self.spec.num_experts % parallel.ep:
            raise UsageError(
                f"--expert-model-parallel-size {parallel.ep} does not divide the model's "
                f"{self.spec.num_experts} experts; allowed: the divisors of "
                f"{self.spec.num_experts}"
            )

    @property
    def rows(self) -> tuple[WeightRow, ...]:
        """The rows of the model under these names."""
        return self.modules.rows(self.spec)

    @property
    def vocab_multiple(self) -> int:
        """``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
        return self.vocab_divisor * self.parallel.tp

    @cached_property
    def experts_per_rank(self) -> int:
        return self.spec.num_experts // self.parallel.ep

    @cached_property
    def present_rows(self) -> tuple[WeightRow, ...]:
        """All rows; on a single stage a tied head is the embedding itself."""
        single = self.parallel.pp == 1
        return tuple(r for r in self.rows if not (self._is_tied(r) and single))

    def _is_tied(self, row: WeightRow) -> bool:
        return bool(self.spec.tie_embeddings and row.tied_to)

    def _place_of(self, row: WeightRow, layer: int) -> LayerPlace:
        stages = self.parallel.stages
        if row.stage == "first":
            return LayerPlace(0, 0, 0)
        if row.stage == "last":
            return LayerPlace(stages.pp - 1, stages.vpp - 1, 0)
        if row.stage == "mtp":
            return LayerPlace(stages.pp - 1, stages.vpp - 1, layer - self.spec.num_layers)
        return stages.place_of(layer)

    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        return self._place_of(row, layer).stage

    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        parallel = self.parallel
        place = self._place_of(row, layer)
        (name,) = self.params_of(row, layer, expert)
        if isinstance(row, ExpertRow):
            per_rank = self.experts_per_rank
            ep, local = divmod(expert, per_rank)
            shares = tuple(
                Placed(
                    Share(etp, parallel.etp, local, per_rank),
                    parallel.expert_replicas(etp, ep, place.stage),
                )
                for etp in range(parallel.etp)
            )
            yield RowPlacement(name, shares)
            return
        multiple = self.vocab_multiple if row.stage in ("first", "last") else 1
        shares = tuple(
            Placed(Share(tp, parallel.tp, multiple=multiple), parallel.replicas(tp, place.stage))
            for tp in range(parallel.tp)
        )
        yield RowPlacement(name, shares, is_replica=self._is_tied(row))

    def params_of(self, row: WeightRow, layer: int, expert: int) -> tuple[str, ...]:
        place = self._place_of(row, layer)
        prefix = chunk_prefix(place.chunk, self.parallel.stages.vpp)
        name = prefix + layer_name(self.modules.param(row.param, self.spec, layer), place.local)
        is_expert = isinstance(row, ExpertRow)
        return (expert_name(name, expert % self.experts_per_rank) if is_expert else name,)

    def expert_run(self, layer: int, expert: int) -> range:
        """Return the experts of the ranks that hold ``expert``."""
        first = expert - expert % self.experts_per_rank
        return range(first, first + self.experts_per_rank)

    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, Sequence[int]]]:
        parallel, stages = self.parallel, self.parallel.stages
        stage = parallel.coords(rank).pp
        per_rank = self.experts_per_rank
        first = parallel.expert_coords(rank).ep * per_rank
        mine = {layer for chunk in range(stages.vpp) for layer in stages.layers_of(stage, chunk)}
        for row in self.present_rows:
            experts = range(first, first + per_rank) if isinstance(row, ExpertRow) else range(1)
            outside = row.stage in ("first", "last", "mtp")
            for layer in row.layers(self.spec):
                if self._place_of(row, layer).stage == stage if outside else layer in mine:
                    yield row, layer, experts
