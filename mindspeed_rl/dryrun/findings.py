"""A dry run: everything that follows from the flags of a run, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.validate import RLPlan, RunPlan
from mindspeed_rl.dryrun.budget import (
    assumptions_of,
    device_bytes,
    resolve_offload,
    usable_bytes,
)
from mindspeed_rl.dryrun.machine import Machine, read_machine
from mindspeed_rl.dryrun.step_time import PhaseSeconds, estimate
from mindspeed_rl.dryrun.suggestions import Suggestion, plan_of, suggest
from mindspeed_rl.dryrun.volumes import UpdateVolume, update_volume
from mindspeed_rl.memory.owners import MemoryPhase, Owner
from mindspeed_rl.memory.prediction import (
    MemoryPrediction,
    Peak,
    engine_is_bf16,
    predict,
)

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks of one pipeline stage; they differ by the padding of buffers alone.

    Attributes:
        first: the rank that was looked at.
        last: the last of them.
        table: its bytes.
    """

    first: int
    last: int
    table: Mapping[MemoryPhase, Mapping[Owner, int]]


@dataclass(frozen=True, slots=True)
class Findings:
    """What a dry run found.

    Attributes:
        config: of the run.
        plan: of the run.
        machine: what a rank runs on.
        prediction: memory of every rank.
        classes: of ranks that are alike.
        groups: ranks in the groups of rank 0 that have communicators on the device, by name.
        peak: the fullest moment.
        budget_bytes: what the run may use of a device.
        offload_reason: why trainer memory leaves as it does.
        volume: of a weight update; ``None`` in supervised runs.
        seconds: of a step by phase.
        suggestions: what would make the peak smaller.
    """

    config: RLRunConfig | PretrainRunConfig
    plan: RunPlan
    machine: Machine
    prediction: MemoryPrediction
    classes: tuple[RankClass, ...]
    groups: Mapping[str, int]
    peak: Peak
    budget_bytes: int
    offload_reason: str
    volume: UpdateVolume | None
    seconds: Sequence[PhaseSeconds]
    suggestions: Sequence[Suggestion]

    @property
    def fits(self) -> bool:
        """Whether the fullest moment fits into the budget."""
        return self.peak.num_bytes <= self.budget_bytes


def world_size(config: RLRunConfig | PretrainRunConfig, environment: Mapping[str, str]) -> int:
    """Ranks of the run that is predicted.

    Raises:
        ValueError: neither the flag nor the environment says.
    """
    if config.dry_run.rl_world_size:
        return config.dry_run.rl_world_size
    given = environment.get("WORLD_SIZE", "")
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            "--rl-dry-run needs the number of ranks: add --rl-world-size N (nodes x ranks per "
            "node), or set WORLD_SIZE"
        )
    return int(given)


def find_out(config: RLRunConfig | PretrainRunConfig, world: int) -> Findings:
    """Predict a run of ``world`` ranks. Pure but for reading config.json and the machine file.

    Args:
        config: of the run.
        world: ranks.

    Raises:
        ValueError: flags that are not possible.
    """
    machine = read_machine(config.dry_run.rl_dry_run_machine)
    plan = plan_of(config, world)
    assumptions = assumptions_of(config, machine)
    device = device_bytes(config, machine.memory_gib * _GIB)
    budget = usable_bytes(device, machine)
    prediction = predict(config, plan, assumptions)
    ranks = prediction.representatives()
    mode, why = resolve_offload(prediction, ranks, budget)
    prediction = replace(prediction, assumptions=replace(assumptions, offload=mode))
    volume = None
    if isinstance(plan, RLPlan) and isinstance(config, RLRunConfig):
        several_nodes = world > machine.ranks_per_node
        relay = config.rollout.reshard_relay == "auto" and several_nodes
        looked_at = dict.fromkeys((ranks[0], ranks[len(ranks) // 2], world - 1))
        item = 2 if engine_is_bf16(config) else 4
        volume = update_volume(plan, looked_at, machine, item, relay)
    per_stage = plan.parallel.ranks_per_stage
    sizes = prediction.group_bytes(0)
    return Findings(
        config=config,
        plan=plan,
        machine=machine,
        prediction=prediction,
        classes=tuple(
            RankClass(rank, rank + per_stage - 1, prediction.rank_table(rank)) for rank in ranks
        ),
        groups={name: len(ranks) for name, ranks in prediction.groups(0).items() if name in sizes},
        peak=prediction.peak(ranks),
        budget_bytes=budget,
        offload_reason=why,
        volume=volume,
        seconds=estimate(prediction, machine, volume.seconds if volume else None),
        suggestions=suggest(prediction, ranks, npu=machine.platform == "npu"),
    )
