"""Where vLLM keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.rules import Row, Share
from mindspeed_rl.parallel.layout import EngineLayout
from mindspeed_rl.resharding.layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)

# vLLM pads the vocabulary to this many rows (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmLayout(TableLayout):
    """Tensor, data and expert parallelism inside each engine, any number of replicas.

    With tied embeddings vLLM's head is the embedding itself: there is no parameter of its own.

    Attributes:
        engine: the rollout layout.
        expert_multiple: each rank's channels of an expert are padded to a multiple of this.
    """

    engine: EngineLayout
    expert_multiple: int = 1

    def __post_init__(self) -> None:
        rows, engine = self.rows, self.engine
        self.check_rows((r for r in rows if not isinstance(r, ExpertRow)), engine.tp)
        self.check_rows((r for r in rows if isinstance(r, ExpertRow)), engine.expert_tp)
        if not self.spec.moe and engine.expert_parallel:
            raise ValueError(f"--rollout-ep {engine.ep}: the model has no experts; allowed is 1")
        if not self.spec.moe and engine.dp > 1:
            raise ValueError(
                f"--rollout-dp {engine.dp}: a model without experts has nothing to share between "
                "data-parallel ranks of an engine; allowed: 1 (every --rollout-tp ranks are an "
                "engine of their own)"
            )
        if self.spec.num_experts % engine.ep:
            raise ValueError(
                f"--rollout-ep {engine.ep} does not divide the model's {self.spec.num_experts} "
                f"experts; allowed: the divisors of {self.spec.num_experts}"
            )

    @property
    def rows(self) -> tuple[Row, ...]:
        """The engine's rows of the model."""
        return weight_table(self.spec.family).engine_rows(self.spec)

    @property
    def vocab_multiple(self) -> int:
        """64, whatever the number of ranks; vLLM refuses what they cannot share."""
        return VOCAB_PADDING

    def placements(self) -> Iterator[RowPlacement]:
        """Every row at every layer and expert."""
        for row in self.rows:
            if self.spec.tie_embeddings and row.tied_to:
                continue
            for layer in row.layers(self.spec):
                if isinstance(row, ExpertRow):
                    yield from self._experts(row, layer)
                else:
                    yield self._dense(row, layer)

    def _dense(self, row: Row, layer: int) -> RowPlacement:
        engine = self.engine
        multiple = self.vocab_multiple if row.stage in ("first", "last") else 1
        shares = tuple(
            Placed(Share(tp, engine.tp, multiple=multiple), engine.replicas(tp))
            for tp in range(engine.tp)
        )
        return RowPlacement(row, layer, 0, layer_name(row.param, layer), shares)

    def _experts(self, row: ExpertRow, layer: int) -> Iterator[RowPlacement]:
        engine = self.engine
        per_rank = self.spec.num_experts // engine.ep
        for expert in range(self.spec.num_experts):
            ep, local = divmod(expert, per_rank)
            shares = tuple(
                Placed(
                    Share(tp, engine.expert_tp, local, per_rank, self.expert_multiple),
                    engine.expert_replicas(ep if engine.expert_parallel else tp),
                )
                for tp in range(engine.expert_tp)
            )
            name = expert_name(layer_name(row.param, layer), local)
            yield RowPlacement(row, layer, expert, name, shares)
