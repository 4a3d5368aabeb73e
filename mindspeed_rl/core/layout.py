"""Positions of ranks in the training and rollout grids: pure arithmetic, no process groups.

Rank order is Megatron's default ``tp-cp-ep-dp-pp``: tensor-parallel ranks are neighbours, pipeline
stages are furthest apart. Experts have a grid of their own over the ranks of a stage: expert tensor
parallelism is innermost, then expert parallelism, then their data parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.ranks import counted
from mindspeed_rl.core.stages import StageLayout


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple


def num_chunks(size: int) -> int:
    """The number of chunks that a sequence is cut into by ``size`` context-parallel ranks."""
    return 2 * size if size > 1 else 1


def nested_sizes(size: int) -> tuple[int, ...]:
    """The sizes 1 to ``size``, each a multiple of the one before: 1, 2, 4, 8, or 1, 3, 6, 12.

    Every group of ``size`` ranks is made of whole groups of the next smaller size.
    """
    sizes = [size]
    while (last := sizes[-1]) > 1:
        sizes.append(last // next(n for n in range(2, last + 1) if last % n == 0))
    return tuple(reversed(sizes))


@dataclass(frozen=True, slots=True)
class Coords:
    """Position of a rank along each axis of the dense grid."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ExpertCoords:
    """Position of a rank along each axis of the expert grid."""

    tp: int
    ep: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of the training layout.

    ``dp`` is what remains of the world: ``world / (tp cp pp)``; experts have a data parallelism of
    ``world / (etp ep pp)``. With ``hybrid_context`` a micro-batch has several rows, each shared by
    some of its context-parallel ranks.
    """

    world: int
    stages: StageLayout
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    hybrid_context: bool = False

    @classmethod
    def build(
        cls,
        *,
        world: int,
        stages: StageLayout,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        hybrid_context: bool = False,
    ) -> ParallelLayout:
        """Check the sizes and make the layout; ``etp`` is ``tp`` when it is not given.

        Raises:
            UsageError: The sizes do not multiply into ``world``.
        """
        etp = tp if etp is None else etp
        for flag, size in (
            ("--tensor-model-parallel-size", tp),
            ("--context-parallel-size", cp),
            ("--expert-model-parallel-size", ep),
            ("--expert-tensor-parallel-size", etp),
        ):
            if size < 1:
                raise UsageError(f"{flag} {size}: must be at least 1")
        pp = stages.pp
        if world % (tp * pp * cp):
            raise UsageError(
                f"world size {world} is not a multiple of --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
                f"{tp * pp * cp}; start torchrun with a multiple of {tp * pp * cp} ranks or "
                "lower a parallel size"
            )
        if world // pp % (ep * etp):
            raise UsageError(
                f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp} = "
                f"{ep * etp} does not divide the {world // pp} ranks of a pipeline stage; lower "
                "one of the two"
            )
        return cls(world, stages, tp, cp, ep, etp, hybrid_context and cp > 1)

    @property
    def pp(self) -> int:
        return self.stages.pp

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def expert_dp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def ranks_per_stage(self) -> int:
        return self.world // self.pp

    @property
    def sequence_multiple(self) -> int:
        """Number of pieces into which context parallelism cuts every sequence."""
        return num_chunks(self.cp)

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """Numbers of context-parallel ranks that may share a row, ascending; the last is ``cp``."""
        return nested_sizes(self.cp) if self.hybrid_context else (self.cp,)

    def context_blocks(self, size: int) -> list[tuple[int, ...]]:
        """All groups of ``size`` neighbours along context parallelism, lowest ranks first.

        Args:
            size: One of :attr:`context_sizes`.
        """
        firsts = (r for r in range(self.world) if self.coords(r).cp % size == 0)
        return [tuple(first + i * self.tp for i in range(size)) for first in firsts]

    def row_multiple(self, *, sequence_parallel: bool) -> int:
        """The number of tokens to whose multiples rows are padded, so that ranks share them.

        Args:
            sequence_parallel: Whether activations are sharded along the sequence.
        """
        return self.sequence_multiple * (self.tp if sequence_parallel else 1)

    def describe(self, *, experts: bool, sequence_parallel: bool) -> str:
        """The layout in words, for the start of a run.

        Args:
            experts: Whether the model has experts.
            sequence_parallel: Whether activations are sharded along the sequence.
        """
        sizes = f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}"
        parts = [f"{sizes} with sequence parallelism" if sequence_parallel else sizes]
        if self.hybrid_context:
            *fewer, most = map(str, self.context_sizes)
            parts.append(f"rows on {', '.join(fewer)} or {most} context-parallel ranks")
        if experts:
            parts.append(f"experts: etp {self.etp} x ep {self.ep} x dp {self.expert_dp}")
        return "; ".join(filter(None, [*parts, self.stages.describe()]))

    def coords(self, rank: int) -> Coords:
        """The position of ``rank`` in the dense grid."""
        return Coords(
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // self.ranks_per_stage,
        )

    def expert_coords(self, rank: int) -> ExpertCoords:
        """The position of ``rank`` in the expert grid."""
        return ExpertCoords(
            tp=rank % self.etp,
            ep=rank // self.etp % self.ep,
            dp=rank // (self.etp * self.ep) % self.expert_dp,
            pp=rank // self.ranks_per_stage,
        )

    def replicas(self, tp: int, pp: int) -> range:
        """The ranks that hold the same dense parameters: all (cp, dp) positions at one (tp, pp)."""
        return range(pp * self.ranks_per_stage + tp, (pp + 1) * self.ranks_per_stage, self.tp)

    def expert_replicas(self, etp: int, ep: int, pp: int) -> range:
        """The ranks that hold the same expert parameters: all positions at one (etp, ep, pp)."""
        first = pp * self.ranks_per_stage
        return range(first + etp + self.etp * ep, first + self.ranks_per_stage, self.etp * self.ep)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The rollout layout: an engine is ``tp x dp`` consecutive ranks, innermost first.

    With ``expert_parallel`` each of these ranks holds whole experts of every layer; without it each
    of them holds a slice of every expert. Dense models have ``dp`` 1.
    """

    world: int
    tp: int
    dp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tp < 1 or self.world % self.tp:
            raise UsageError(
                f"--rollout-tp {self.tp} does not divide the world size {self.world}; allowed: "
                f"the divisors of {self.world}"
            )
        if self.dp < 1 or self.world % self.size:
            raise UsageError(
                f"--rollout-tp {self.tp} x --rollout-dp {self.dp} = {self.size} does not divide "
                f"the world size {self.world}; allowed for --rollout-dp: the divisors of "
                f"{self.world // self.tp}"
            )

    @property
    def size(self) -> int:
        """Number of ranks of one engine; they share the experts of a layer, whole or sliced."""
        return self.tp * self.dp

    @property
    def ep(self) -> int:
        """Number of ranks that the whole experts of a layer are spread over; 1 for slices."""
        return self.size if self.expert_parallel else 1

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share one expert."""
        return 1 if self.expert_parallel else self.size

    @property
    def num_replicas(self) -> int:
        """Number of independent engines."""
        return self.world // self.size

    def replica_of(self, rank: int) -> int:
        """The number of the engine that a rank belongs to."""
        return rank // self.size

    def tp_rank(self, rank: int) -> int:
        """The position of a rank among the tensor-parallel ranks of its engine."""
        return rank % self.tp

    def expert_rank(self, rank: int) -> int:
        """The position of a rank among the ranks of its engine, which share the experts."""
        return rank % self.size

    def describe(self, *, experts: bool) -> str:
        """The layout in words, for a run's start; ``experts``: whether the model has experts."""
        engines = f"{counted(self.num_replicas, 'replica')} of tp {self.tp} x dp {self.dp}"
        return engines + (f"; experts: tp {self.expert_tp} x ep {self.ep}" if experts else "")

    @property
    def num_groups(self) -> int:
        """Number of rank groups with prompts of their own: data-parallel ranks of all engines."""
        return self.world // self.tp

    def group_of(self, rank: int) -> int:
        """The number of the group with prompts of its own that a rank belongs to."""
        return rank // self.tp

    def first_rank_of(self, group: int) -> int:
        """The first rank of a group with prompts of its own."""
        return group * self.tp

    def replicas(self, tp_rank: int) -> range:
        """The ranks that hold the same dense weights."""
        return range(tp_rank, self.world, self.tp)

    def expert_replicas(self, position: int) -> range:
        """The ranks at one position of all engines, which hold the same expert weights."""
        return range(position, self.world, self.size)
