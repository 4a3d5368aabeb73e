"""Turns the samples of an RL step into the micro-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from mindspeed_rl.algorithms.types import Denominators
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.rl.components import Components
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import PlacedSamples


@dataclass(frozen=True, slots=True)
class OptimizerBatch:
    """This rank's part of one optimizer step: packed micro-batches and the global denominators."""

    micro_batches: list[MicroBatch]
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of all optimizer steps of an RL step, and the metrics of preparing them.

    Attributes:
        updates: One batch for each optimizer step.
        placed: The samples that the batches consist of.
        metrics: Metrics of the step so far.
    """

    updates: list[OptimizerBatch]
    placed: PlacedSamples
    metrics: MetricSet = field(default_factory=MetricSet)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all optimizer steps, in order."""
        return [m for update in self.updates for m in update.micro_batches]

    def with_column(self, name: str, values: Sequence[torch.Tensor | None]) -> StepBatches:
        """Return a copy with a column added; ``None`` off the last pipeline stage."""
        given = iter(values)
        updates = [
            replace(u, micro_batches=[m.with_column(name, next(given)) for m in u.micro_batches])
            for u in self.updates
        ]
        return replace(self, updates=updates)

    def changed(self, change: Callable[[list[MicroBatch]], list[MicroBatch]]) -> StepBatches:
        """Return a copy with the micro-batches of each optimizer step changed."""
        updates = [replace(u, micro_batches=change(u.micro_batches)) for u in self.updates]
        return replace(self, updates=updates)

    def with_metrics(self, metrics: MetricSet) -> StepBatches:
        """Return a copy with ``metrics`` merged in."""
        return replace(self, metrics=self.metrics.merge(metrics))

    def by_update(
        self, compute: Callable[[list[MicroBatch]], Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """Apply ``compute`` to each optimizer step, and return its values in micro-batch order."""
        return [values for update in self.updates for values in compute(update.micro_batches)]


def build_batches(run: Components, samples: Sequence[RolloutInfo]) -> StepBatches:
    """Place, move and pack the samples of each optimizer step, by the same plans on all ranks.

    Collective: the training grid.
    """
    store = run.samples
    with run.phase("exchange"):
        placed = store.place(samples)
    updates = []
    for number, packed in enumerate(store.pack(placed, drop_truncated=True)):
        part = samples[number * store.samples_per_update : (number + 1) * store.samples_per_update]
        counts = Denominators.of(store.num_trained(s) for s in part)
        updates.append(OptimizerBatch(run.models.policy.prepare(packed), counts))
    return StepBatches(updates, placed, placed.metrics)


def sample_of_token(micro: MicroBatch, position: dict[int, int]) -> torch.Tensor:
    """Return [N] int64: the index of the sample of the step that each trained token belongs to.

    Args:
        micro: Micro-batch with the tokens.
        position: Index of each sample in the step, by sample id.
    """
    order = [position[i] for i in micro.sample_ids]
    owners = torch.tensor(order, dtype=torch.int64, device=micro.sequence_of.device)
    return owners[micro.sequence_of]
