"""Where each rank stands in the training grid: pure arithmetic, no process groups.

Rank order is Megatron's default ``tp-cp-ep-dp-pp``: tensor-parallel ranks are neighbours, pipeline
stages are furthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coords:
    """Position of a rank along each axis of the dense grid."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The training layout. ``dp`` is what remains: ``world / (tp cp pp)``.

    ``layers_per_stage`` lists the layers of each pipeline stage in order.
    """

    world: int
    tp: int
    pp: int
    cp: int
    layers_per_stage: tuple[int, ...]

    @classmethod
    def build(
        cls, *, world: int, tp: int = 1, pp: int = 1, cp: int = 1, num_layers: int
    ) -> ParallelLayout:
        """An even split of ``num_layers`` over ``pp`` stages.

        Raises:
            ValueError: sizes that do not multiply into ``world`` or do not divide the layers.
        """
        for flag, size in (
            ("--tensor-model-parallel-size", tp),
            ("--pipeline-model-parallel-size", pp),
            ("--context-parallel-size", cp),
        ):
            if size < 1:
                raise ValueError(f"{flag} {size}: must be at least 1")
        if world % (tp * pp * cp):
            raise ValueError(
                f"world size {world} is not a multiple of --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
                f"{tp * pp * cp}; start torchrun with a multiple of {tp * pp * cp} ranks or "
                "lower a parallel size"
            )
        if num_layers % pp:
            raise ValueError(
                f"--pipeline-model-parallel-size {pp} does not divide the model's {num_layers} "
                f"layers; allowed: the divisors of {num_layers}"
            )
        return cls(world, tp, pp, cp, (num_layers // pp,) * pp)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    def coords(self, rank: int) -> Coords:
        """The position of ``rank``."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} is not in a world of {self.world}")
        return Coords(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // self.ranks_per_stage,
        )

    def rank(self, coords: Coords) -> int:
        """The rank at a position."""
        return (
            coords.tp
            + self.tp * (coords.cp + self.cp * coords.dp)
            + self.ranks_per_stage * coords.pp
        )

    def replicas(self, tp: int, pp: int) -> range:
        """The ranks that hold the same dense parameters: all of (cp, dp) at one (tp, pp)."""
        return range(pp * self.ranks_per_stage + tp, (pp + 1) * self.ranks_per_stage, self.tp)

    def stage_of(self, layer: int) -> int:
        """The pipeline stage that holds a global layer."""
        first = 0
        for stage, count in enumerate(self.layers_per_stage):
            if first <= layer < first + count:
                return stage
            first += count
        raise IndexError(f"layer {layer} is not one of {sum(self.layers_per_stage)}")

    def first_layer(self, stage: int) -> int:
        """The first global layer of a stage."""
        return sum(self.layers_per_stage[:stage])


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The rollout layout: replicas of ``tp`` consecutive ranks (vLLM's order)."""

    world: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.world % self.tp:
            raise ValueError(
                f"--rollout-tp {self.tp} does not divide the world size {self.world}; allowed: "
                f"the divisors of {self.world}"
            )

    @property
    def num_replicas(self) -> int:
        """Independent engines."""
        return self.world // self.tp

    def replica_of(self, rank: int) -> int:
        """The engine that a rank belongs to."""
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        """Position inside the engine."""
        return rank % self.tp

    def replicas(self, tp_rank: int) -> range:
        """The ranks that hold the same weights."""
        return range(tp_rank, self.world, self.tp)
