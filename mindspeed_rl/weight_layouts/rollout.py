"""The layout of an inference engine, for all kinds of engines: where it keeps each rectangle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.rules import Share, WeightRow
from mindspeed_rl.weight_layouts.base import (
    Placed,
    RowPlacement,
    TableLayout,
    expert_name,
    layer_name,
)

# The expert in each physical slot of a layer, slots in order over the ranks that share it.
Slots = tuple[int, ...]


@lru_cache(maxsize=512)
def slots_of_experts(physical: Slots, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Return the physical slots of every expert."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(physical):
        slots[expert].append(slot)
    return tuple(map(tuple, slots))


@lru_cache(maxsize=512)
def _runs_of_experts(physical: Slots, num_experts: int, per_rank: int) -> tuple[range, ...]:
    """Return the run of every expert: neighbours in order in the slots of a rank, each once."""
    slots = slots_of_experts(physical, num_experts)
    runs: list[range] = []
    while (first := len(runs)) < num_experts:
        end = first + 1
        while end < num_experts and _follows(slots[end - 1], slots[end], per_rank):
            end += 1
        runs += [range(first, end)] * (end - first)
    return tuple(runs)


def _follows(before: tuple[int, ...], after: tuple[int, ...], per_rank: int) -> bool:
    """Tell whether an expert is in one slot only, next to the one before on the same rank."""
    return len(before) == 1 and after == (before[0] + 1,) and after[0] % per_rank > 0


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
        layer_experts: The same for single layers, as (layer, slots); all other layers have
            ``physical_experts``. As many slots as those have.
    """

    engine: EngineLayout
    expert_multiple: int = 1
    physical_experts: Slots = ()
    layer_experts: tuple[tuple[int, Slots], ...] = ()

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
        count = len(self._everywhere)
        for layer, slots in self.layer_experts:
            assert len(slots) == count and set(slots) == set(range(num_experts)), (
                f"layer {layer}: {len(slots)} slots of experts where all layers have {count}"
            )

    @property
    def has_experts_everywhere(self) -> bool:
        """Whether every rank has a part of every expert: there is no expert parallelism."""
        return self.spec.num_experts > 0 and not self.engine.expert_parallel

    @cached_property
    def present_rows(self) -> tuple[WeightRow, ...]:
        """Rows of the model, without that of an output head tied to the embedding."""
        return tuple(r for r in self.rows if not (self.spec.tie_embeddings and r.tied_to))

    def pipeline_stage_of(self, row: WeightRow, layer: int) -> int:
        """Return the pipeline stage of a row, which is 0: engines have no pipeline."""
        return 0

    @cached_property
    def _everywhere(self) -> Slots:
        return self.physical_experts or tuple(range(self.spec.num_experts))

    @cached_property
    def _of_layers(self) -> dict[int, Slots]:
        return dict(self.layer_experts)

    def experts_at(self, layer: int) -> Slots:
        """Return the expert in each physical slot of a layer."""
        return self._of_layers.get(layer, self._everywhere)

    @cached_property
    def experts_per_rank(self) -> int:
        """Number of physical experts of a layer that a rank holds; 0 without experts."""
        return len(self._everywhere) // self.engine.ep

    def _placement_key(self, pattern: str, layer: int) -> Hashable:
        """Return the key of all rollout layouts, for experts with the slots at the layer."""
        key = super()._placement_key(pattern, layer)
        if self.layer_experts and isinstance(self._rows_of_patterns[pattern][layer][0], ExpertRow):
            return key, self.experts_at(layer)
        return key

    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        """Yield the place of a row, or its places in every slot of its expert."""
        if isinstance(row, ExpertRow):
            yield from self._expert_places(row, layer, expert)
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
        yield RowPlacement(layer_name(row.param, layer), shares)

    def keeps_whole(self, row: WeightRow) -> bool:
        """Tell whether tensor-parallel ranks keep a row whole that they could cut."""
        return False

    def _slots_of(self, layer: int, expert: int) -> tuple[int, ...]:
        return slots_of_experts(self.experts_at(layer), self._num_experts)[expert]

    def params_of(self, row: WeightRow, layer: int, expert: int) -> list[str]:
        name = layer_name(row.param, layer)
        if not isinstance(row, ExpertRow):
            return [name]
        per_rank = self.experts_per_rank
        return [expert_name(name, slot % per_rank) for slot in self._slots_of(layer, expert)]

    def _expert_places(self, row: ExpertRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        engine, per_rank = self.engine, self.experts_per_rank
        params = self.params_of(row, layer, expert)
        for copy, slot in enumerate(self._slots_of(layer, expert)):
            ep, local = divmod(slot, per_rank)
            shares = tuple(
                Placed(
                    Share(tp, engine.expert_tp, local, per_rank, self.expert_multiple),
                    engine.expert_replicas(ep if engine.expert_parallel else tp),
                )
                for tp in range(engine.expert_tp)
            )
            yield RowPlacement(params[copy], shares, is_replica=copy > 0)

    def expert_run(self, layer: int, expert: int) -> range:
        """Return the neighbours of an expert whose slots follow each other on the same rank."""
        slots, per_rank = self.experts_at(layer), self.experts_per_rank
        return _runs_of_experts(slots, self._num_experts, per_rank)[expert]

    def held_by(self, rank: int) -> Iterator[tuple[WeightRow, int, Sequence[int]]]:
        engine, spec = self.engine, self.spec
        ep = engine.expert_rank(rank) if engine.expert_parallel else 0
        mine = slice(ep * self.experts_per_rank, (ep + 1) * self.experts_per_rank)
        for row in self.present_rows:
            for layer in row.layers(spec):
                experts = self.experts_at(layer)[mine] if isinstance(row, ExpertRow) else (0,)
                yield row, layer, experts
