"""The handover of a run: its figures for the dry run, from configuration and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.handover.hiding import Hiding, hiding
from mindspeed_rl.handover.joint import Handover, handover
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weight_layouts.rollout import RolloutLayout
from mindspeed_rl.weights.planner import Overlaps, plan_reshard
from mindspeed_rl.weights.traffic import RankTraffic, element_bytes_of, rank_traffic


@dataclass(frozen=True, slots=True)
class RunHandover:
    """What a dry run says about the time after the last optimizer step.

    Attributes:
        moved: Bytes of gather and sync of all ranks.
        hiding: Seconds of optimizer step and sync at full speed, where known.
    """

    moved: Handover
    hiding: Hiding | None

    def lines(self, whole_seconds: float | None) -> Iterator[str]:
        """Yield the lines for the terminal.

        Args:
            whole_seconds: Predicted seconds of a step of the run; ``None``: not predicted.
        """
        yield "after the last optimizer step, of all ranks:"
        yield from (f"  {line}" for line in aligned(list(self.moved.rows())))
        yield from (f"  {line}" for line in self.moved.verdict())
        if self.hiding:
            yield f"  {self.hiding.line(whole_seconds)}"

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        found = self.moved.as_json()
        if self.hiding:
            found["optimizer_step_s"] = self.hiding.step_seconds
            found["weight_update_s"] = self.hiding.update_seconds
        return found


def handover_of_run(
    config: RLRunConfig,
    source: MegatronLayout,
    target: ShardLayout,
    *,
    machine: str,
    optimizer_bytes: int,
) -> RunHandover | None:
    """Count the gather of parameters and the weight update of all ranks. Pure.

    Args:
        config: Configuration of the run.
        source: Layout of the trainer.
        target: Layout of the engine.
        machine: Name of the machine.
        optimizer_bytes: Largest optimizer state of a rank on its device; 0: it is not there.

    Returns:
        The figures; ``None`` with adapters, of which only the factors are gathered and the engine's
        weights are computed.
    """
    if config.lora.is_on:
        return None
    bf16 = config.train.bf16
    moved = handover(
        source,
        target,
        train_item=2 if bf16 else 4,
        engine_item=_engine_item(config),
        distributed_optimizer=config.parallel.use_distributed_optimizer,
    )
    most = max(rank.sync_bytes for rank in moved.ranks)
    return RunHandover(
        moved, hiding(machine, optimizer_bytes=optimizer_bytes, bf16=bf16, sync_bytes=most)
    )


def update_traffic(
    config: RLRunConfig,
    source: MegatronLayout,
    target: RolloutLayout,
    ranks: Sequence[int],
    ranks_per_node: int,
) -> list[RankTraffic]:
    """Count what a weight update moves on some ranks. Pure; a second for 671e9 weights."""
    world, everywhere = source.parallel.world, target.has_experts_everywhere
    relay = config.rollout.relays(world, ranks_per_node, experts_everywhere=everywhere)
    bytes_of = element_bytes_of(source, _engine_item(config))
    overlaps = Overlaps(source, target, ranks_per_node, relay)
    plans = (
        plan_reshard(source, target, rank, ranks_per_node, relay=relay, overlaps=overlaps)
        for rank in ranks
    )
    return [rank_traffic(plan, bytes_of, ranks_per_node) for plan in plans]


def _engine_item(config: RLRunConfig) -> int:
    return 2 if config.rollout.engine_is_bf16(config.train) else 4
