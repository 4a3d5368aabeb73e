"""Where megatron-core keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.parallel.layout import ParallelLayout
from mindspeed_rl.resharding.layouts.base import RowPlacement, TableLayout, layer_name


@dataclass(frozen=True)
class MegatronLayout(TableLayout):
    """Tensor, pipeline, context and data parallel layout of the trainer.

    Local parameter names count layers from 0 on every stage, as megatron-core does. With tied
    embeddings and several stages the last stage keeps a mirror of the embedding.
    """

    parallel: ParallelLayout
    vocab_divisor: int = 128

    def __post_init__(self) -> None:
        self.check_rows(weight_table(self.spec.family).trainer, self.parallel.tp)

    @property
    def vocab_multiple(self) -> int:
        """``--make-vocab-size-divisible-by`` times the tensor-parallel size."""
        return self.vocab_divisor * self.parallel.tp

    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer."""
        parallel = self.parallel
        for row in weight_table(self.spec.family).trainer:
            mirror = bool(self.spec.tie_embeddings and row.tied_to)
            if mirror and parallel.pp == 1:
                continue
            layers = range(self.spec.num_layers) if row.stage == "layer" else (0,)
            for layer in layers:
                stage = {"first": 0, "last": parallel.pp - 1}.get(row.stage)
                local = 0
                if stage is None:
                    stage = parallel.stage_of(layer)
                    local = layer - parallel.first_layer(stage)
                holders = tuple(parallel.replicas(tp, stage) for tp in range(parallel.tp))
                yield RowPlacement(row, layer, layer_name(row.param, local), holders, mirror)
