"""Where vLLM keeps each rectangle of each HF tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.expert_rules import ExpertRow, StackedExperts
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.rules import Share, WeightRow
from mindspeed_rl.weights.layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)

# Where the tables of the models have the experts: vLLM 0.32.
EXPERT_MODULE = "mlp.experts.routed_experts"
# vLLM pads the vocabulary to this many rows (DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


@dataclass(frozen=True)
class VllmLayout(TableLayout):
    """Tensor, pipeline, data and expert parallelism inside each engine, any number of replicas.

    With tied embeddings vLLM's head is the embedding itself: there is no parameter of its own, and
    the last of several stages keeps a copy of the embedding.

    Attributes:
        engine: the rollout layout.
        expert_multiple: each rank's channels of an expert are padded to a multiple of this.
        physical_experts: the expert in each physical slot, slots in order over the ranks that
            share a layer (redundant experts: EPLB's physical-to-logical map); empty: every
            expert once, in order. Needs expert parallelism.
        transposed_experts: expert matrices are stored as [columns, rows], as by vLLM-Ascend.
        whole_shared_experts: where experts are spread over tensor and data parallelism, every rank
            keeps the shared experts whole, as by vLLM but not by vLLM-Ascend.
        expert_module: path of the module with the experts, below a layer.
    """

    engine: EngineLayout
    expert_multiple: int = 1
    physical_experts: tuple[int, ...] = ()
    transposed_experts: bool = False
    whole_shared_experts: bool = False
    expert_module: str = EXPERT_MODULE

    def __post_init__(self) -> None:
        rows, engine = self.rows, self.engine
        self.check_rows((r for r in rows if not isinstance(r, ExpertRow)), engine.tp)
        self.check_rows((r for r in rows if isinstance(r, ExpertRow)), engine.expert_tp)
        if not self.spec.moe and engine.expert_parallel:
            raise UsageError(f"--rollout-ep {engine.ep}: the model has no experts; allowed is 1")
        if not self.spec.moe and engine.dp > 1:
            raise UsageError(
                f"--rollout-dp {engine.dp}: a model without experts has nothing to share between "
                "data-parallel ranks of an engine; allowed: 1 (every --rollout-tp ranks are an "
                "engine of their own)"
            )
        if engine.pp > self.spec.num_layers:
            raise UsageError(f"rollout pp {engine.pp}: the model has {self.spec.num_layers} layers")
        self._check_experts()

    def _check_experts(self) -> None:
        num_experts, ep, slots = self.spec.num_experts, self.engine.ep, self.physical_experts
        if slots:
            if not self.engine.expert_parallel:
                raise UsageError("a map of physical experts needs expert parallelism (rollout ep)")
            if set(slots) != set(range(num_experts)) or len(slots) % ep:
                raise UsageError(
                    f"a map of {len(slots)} physical experts on {ep} ranks must hold each of the "
                    f"{num_experts} experts at least once, and equally many on every rank"
                )
        elif num_experts % ep:
            raise UsageError(
                f"--rollout-ep {ep} does not divide the model's {num_experts} experts; allowed: "
                f"the divisors of {num_experts}"
            )

    @cached_property
    def rows(self) -> tuple[WeightRow, ...]:
        """The engine's rows of the model."""
        rows = weight_table(self.spec.family).engine_rows(self.spec)
        return tuple(
            replace(
                row,
                transposed=self.transposed_experts,
                param=row.param.replace(EXPERT_MODULE, self.expert_module),
            )
            if isinstance(row, StackedExperts)
            else row
            for row in rows
        )

    @property
    def vocab_multiple(self) -> int:
        """64, whatever the number of ranks; vLLM refuses what they cannot share."""
        return VOCAB_PADDING

    @cached_property
    def present_rows(self) -> tuple[WeightRow, ...]:
        """All rows but a tied head."""
        return tuple(r for r in self.rows if not (self.spec.tie_embeddings and r.tied_to))

    @cached_property
    def _stage_of_layers(self) -> tuple[int, ...]:
        engine, num_layers = self.engine, self.spec.num_layers
        return tuple(s for s in range(engine.pp) for _ in engine.layers_of(s, num_layers))

    def _stages(self, row: WeightRow, layer: int) -> tuple[int, ...]:
        """The pipeline stages that hold a row; the first of them is no copy."""
        last = self.engine.pp - 1
        if row.stage == "first":
            return (0, last) if self.spec.tie_embeddings and last else (0,)
        return (last,) if row.stage == "last" else (self._stage_of_layers[layer],)

    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        """The pipeline stage of a row at a layer."""
        return self._stages(row, layer)[0]

    @cached_property
    def _slots_of_experts(self) -> tuple[tuple[int, ...], ...]:
        """The physical slots of every expert."""
        physical = self.physical_experts or tuple(range(self.spec.num_experts))
        slots: list[list[int]] = [[] for _ in range(self.spec.num_experts)]
        for slot, expert in enumerate(physical):
            slots[expert].append(slot)
        return tuple(map(tuple, slots))

    @property
    def experts_per_rank(self) -> int:
        """Physical experts of a layer that a rank holds; 0 without experts."""
        return (len(self.physical_experts) or self.spec.num_experts) // self.engine.ep

    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        """Where a row is at a layer and expert: on every stage and in every slot that holds it."""
        name = layer_name(row.param, layer)
        stages = self._stages(row, layer)
        if isinstance(row, ExpertRow):
            yield from self._expert_places(row, name, stages[0], expert)
            return
        engine = self.engine
        multiple = self.vocab_multiple if row.stage in ("first", "last") else 1
        whole = self._keeps_whole(row)
        for stage in stages:
            shares = tuple(
                Placed(
                    Share() if whole else Share(tp, engine.tp, multiple=multiple),
                    engine.replicas(tp, stage),
                )
                for tp in range(engine.tp)
            )
            yield RowPlacement(row, name, shares, is_replica=stage != stages[0])

    def _keeps_whole(self, row: WeightRow) -> bool:
        """Whether tensor-parallel ranks keep a row whole that they could cut.

        Source: ``ParallelConfig.use_sequence_parallel_moe`` of vLLM.
        """
        engine = self.engine
        spread = engine.expert_parallel and engine.tp > 1 and engine.dp > 1
        return self.whole_shared_experts and spread and row.when == "shared_ffn_size"

    def _expert_places(
        self, row: ExpertRow, name: str, stage: int, expert: int
    ) -> Iterator[RowPlacement]:
        engine, per_rank = self.engine, self.experts_per_rank
        for copy, slot in enumerate(self._slots_of_experts[expert]):
            ep, local = divmod(slot, per_rank)
            shares = tuple(
                Placed(
                    Share(tp, engine.expert_tp, local, per_rank, self.expert_multiple),
                    engine.expert_replicas(ep if engine.expert_parallel else tp, stage),
                )
                for tp in range(engine.expert_tp)
            )
            yield RowPlacement(row, expert_name(name, local), shares, is_replica=copy > 0)

    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, int]]:
        """Row, layer and expert of everything that a rank holds."""
        engine, spec = self.engine, self.spec
        stage = engine.stage_of(rank)
        physical = self.physical_experts or tuple(range(spec.num_experts))
        ep = engine.expert_rank(rank) if engine.expert_parallel else 0
        mine = physical[ep * self.experts_per_rank : (ep + 1) * self.experts_per_rank]
        for row in self.present_rows:
            experts = mine if isinstance(row, ExpertRow) else (0,)
            for layer in row.layers(spec):
                if stage in self._stages(row, layer):
                    yield from ((row, layer, expert) for expert in experts)
