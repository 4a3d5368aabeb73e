"""Where vLLM keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.parallel.layout import EngineLayout
from mindspeed_rl.resharding.layouts.base import RowPlacement, TableLayout, layer_name

# vLLM pads the vocabulary to this many rows (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmLayout(TableLayout):
    """Tensor parallelism inside each engine, any number of replicas.

    With tied embeddings vLLM's head is the embedding itself: there is no parameter of its own.
    """

    engine: EngineLayout

    def __post_init__(self) -> None:
        self.check_rows(weight_table(self.spec.family).engine, self.engine.tp)

    @property
    def vocab_multiple(self) -> int:
        """64, whatever the number of ranks; vLLM refuses what they cannot share."""
        return VOCAB_PADDING

    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer."""
        holders = tuple(self.engine.replicas(tp) for tp in range(self.engine.tp))
        for row in weight_table(self.spec.family).engine:
            if self.spec.tie_embeddings and row.tied_to:
                continue
            for layer in range(self.spec.num_layers) if row.stage == "layer" else (0,):
                yield RowPlacement(row, layer, layer_name(row.param, layer), holders)
