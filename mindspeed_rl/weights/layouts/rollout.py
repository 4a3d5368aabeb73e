"""The layout of an inference engine, for all kinds of engines: where it keeps each rectangle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.rules import Share, WeightRow
from mindspeed_rl.weights.layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)


@dataclass(frozen=True)
class RolloutLayout(TableLayout):
    """Tensor, data and expert parallelism inside each engine, any number of replicas.

    A subclass for each kind of engine gives its rows and its padding of the vocabulary. With tied
    embeddings the head has no parameter of its own: it is the embedding.

    Attributes:
        engine: Ranks of the engines.
        expert_multiple: Each rank's channels of an expert are padded to a multiple of this.
        physical_experts: The expert in each physical slot, slots in order over the ranks that share
            a layer (redundant experts: EPLB's physical-to-logical map); empty: every expert once,
            in order. Every expert is there, equally many on each rank; needs expert parallelism.
    """

    engine: EngineLayout
    expert_multiple: int = 1
    physical_experts: tuple[int, ...] = ()

    @property
    @abstractmethod
    def rows(self) -> tuple[WeightRow, ...]:
        """The engine's rows of the model."""

    @property
    @abstractmethod
    def vocab_multiple(self) -> int:
        """The vocabulary is padded to a multiple of this number."""

    def __post_init__(self) -> None:
        rows, engine = self.rows, self.engine
        self.check_rows((r for r in rows if not isinstance(r, ExpertRow)), engine.tp)
        self.check_rows((r for r in rows if isinstance(r, ExpertRow)), engine.expert_tp)
        if not self.spec.expert_layers and engine.expert_parallel:
            raise UsageError(f"--rollout-ep {engine.ep}: the model has no experts; allowed is 1")
        if not self.spec.expert_layers and engine.dp > 1:
            raise UsageError(
                f"--rollout-dp {engine.dp}: a model without experts has nothing to share between "
                "data-parallel ranks of an engine; allowed: 1 (every --rollout-tp ranks are an "
                "engine of their own)"
            )
        num_experts, ep = self.spec.num_experts, engine.ep
        if num_experts % ep and not self.physical_experts:
            raise UsageError(
                f"--rollout-ep {ep} does not divide the model's {num_experts} experts; allowed: "
                f"the divisors of {num_experts}"
            )

    @cached_property
    def present_rows(self) -> tuple[WeightRow, ...]:
        """Rows of the model, without that of an output head tied to the embedding."""
        return tuple(r for r in self.rows if not (self.spec.tie_embeddings and r.tied_to))

    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        """Return the pipeline stage of a row, which is 0: engines have no pipeline."""
        return 0

    @cached_property
    def _slots_of_experts(self) -> tuple[tuple[int, ...], ...]:
        """The physical slots of every expert."""
        physical = self.physical_experts or tuple(range(self.spec.num_experts))
        slots: list[list[int]] = [[] for _ in range(self.spec.num_experts)]
        for slot, expert in enumerate(physical):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    @cached_property
    def experts_per_rank(self) -> int:
        """Number of physical experts of a layer that a rank holds; 0 without experts."""
        return (len(self.physical_experts) or self.spec.num_experts) // self.engine.ep

    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        """Yield the place of a row, or its places in every slot of its expert."""
        name = layer_name(row.param, layer)
        if isinstance(row, ExpertRow):
            yield from self._expert_places(row, name, expert)
            return
        engine = self.engine
        multiple = self.vocab_multiple if row.stage in ("first", "last") else 1
        whole = self.keeps_whole(row)
        shares = tuple(
            Placed(
                Share() if whole else Share(tp, engine.tp, multiple=multiple), engine.replicas(tp)
            )
            for tp in range(engine.tp)
        )
        yield RowPlacement(name, shares)

    def keeps_whole(self, row: WeightRow) -> bool:
        """Tell whether tensor-parallel ranks keep a row whole that they could cut."""
        return False

    def _expert_places(self, row: ExpertRow, name: str, expert: int) -> Iterator[RowPlacement]:
        engine, per_rank = self.engine, self.experts_per_rank
        for copy, slot in enumerate(self._slots_of_experts[expert]):
            ep, local = divmod(slot, per_rank)
            shares = tuple(
                Placed(
                    Share(tp, engine.expert_tp, local, per_rank, self.expert_multiple),
                    engine.expert_replicas(ep if engine.expert_parallel else tp),
                )
                for tp in range(engine.expert_tp)
            )
            yield RowPlacement(expert_name(name, local), shares, is_replica=copy > 0)

    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, int]]:
        engine, spec = self.engine, self.spec
        physical = self.physical_experts or tuple(range(spec.num_experts))
        ep = engine.expert_rank(rank) if engine.expert_parallel else 0
        mine = physical[ep * self.experts_per_rank : (ep + 1) * self.experts_per_rank]
        for row in self.present_rows:
            experts = mine if isinstance(row, ExpertRow) else (0,)
            for layer in row.layers(spec):
                yield from ((row, layer, expert) for expert in experts)
