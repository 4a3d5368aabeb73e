"""Old log-probs and those of the reference in rows of one sequence each, also during rollouts.

A row of one sequence gives the same bits wherever and whenever it is computed, so a sample may get
its log-probs in either of two places:

- during the rollout, on the data-parallel replica whose engines sampled it, as soon as all engines
  of the replica are done (:class:`TailPasses`). They become columns of the sample and move with
  its tokens;
- after the rollout, on the replica that trains on it (:func:`single_row_logprobs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from mindspeed_rl.adapters.base_model import BaseModel
from mindspeed_rl.building.models import Models
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.types import EarlyLogprobs, Rollout, TrainSample
from mindspeed_rl.launch.job import Job
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rl.batches import StepBatches
from mindspeed_rl.samples.columns import EARLY_COLUMNS, Column
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.placement import BatchRules
from mindspeed_rl.samples.store import SampleStore
from mindspeed_rl.trainer.train_engine import TrainEngine


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished sample as the ranks of a replica tell it each other."""

    sample_id: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def as_train_sample(self) -> TrainSample:
        ids = torch.tensor((*self.prompt, *self.response), dtype=torch.int64)
        return TrainSample(self.sample_id, ids, len(self.prompt))


@dataclass(frozen=True)
class TailPasses:
    """The passes between the end of a replica's engines and that of the last ones.

    Attributes:
        models: Model of each pass by its name, a field of :class:`EarlyLogprobs`. Their weights on
            this rank stay on the device during rollouts; the policy has those that the engines
            sample with. A pass changes nothing that another one reads, so their order is free.
        rules: Rules of the rows.
        group: Group on the host of the ranks of this data-parallel replica.
        leads_engine: Whether this rank has the samples of its engine, for all ranks that share it.
        drop_truncated: Whether responses that were cut need no log-probs.
    """

    models: Mapping[str, TrainEngine | BaseModel]
    rules: BatchRules
    group: dist.ProcessGroup
    leads_engine: bool
    drop_truncated: bool

    def __call__(self, rollouts: Sequence[Rollout]) -> dict[int, EarlyLogprobs]:
        """Work on finished samples until all engines are done. Collective: the world.

        It begins when all engines of this replica are done. The first rank of the replica sees
        whether all other ranks of the world have come here, too, and the replica stops between two
        bundles of rows, so the last engine of all waits for the passes over one bundle at most.

        Args:
            rollouts: Rollouts of this rank's engine.

        Returns:
            Log-probs of all tokens of a response by sample id; of samples of this replica. A
            sample has those of all passes.
        """
        everyone = dist.all_reduce(torch.zeros(1), async_op=True)
        samples = self._samples_of_replica(rollouts)
        mine: dict[int, EarlyLogprobs] = {}
        for start in range(0, len(samples), self.rules.bundle):
            if self._is_over(everyone):
                break
            mine |= self._logprobs(samples[start : start + self.rules.bundle])
        everyone.wait()
        tells = all(model.is_metrics_rank for model in self.models.values())
        parts = gather_objects(mine if tells else {}, self.group)
        return {sample_id: values for part in parts for sample_id, values in part.items()}

    def _samples_of_replica(self, rollouts: Sequence[Rollout]) -> list[_Finished]:
        """Return the samples of all engines of the replica. Collective: the replica."""
        mine = [
            _Finished(r.sample_id, r.prompt.token_ids, r.completion.token_ids)
            for r in rollouts
            if self.leads_engine and not (self.drop_truncated and r.completion.truncated)
        ]
        everything = chain.from_iterable(gather_objects(mine, self.group))
        return sorted(everything, key=lambda sample: sample.sample_id)

    def _is_over(self, everyone: dist.Work) -> bool:
        """Return what the first rank of the replica sees. Collective: the replica."""
        seen = torch.tensor(int(everyone.is_completed()))
        dist.broadcast(seen, group=self.group, group_src=0)
        return bool(seen)

    def _logprobs(self, samples: Sequence[_Finished]) -> dict[int, EarlyLogprobs]:
        """Return the log-probs of a bundle, on the last pipeline stage. Collective: the replica."""
        rows = self.rules.pack_alone([s.as_train_sample() for s in samples])
        found: list[dict[str, bytes]] = [{} for _ in samples]
        for name, model in self.models.items():
            # The rows behind those of the samples are empty.
            for of_sample, values in zip(found, model.logprobs(model.prepare(rows)), strict=False):
                if values is not None:
                    of_sample[name] = values.cpu().numpy().tobytes()
        return {
            sample.sample_id: EarlyLogprobs(**of_sample)
            for sample, of_sample in zip(samples, found, strict=True)
            if of_sample
        }


def build_tail(
    job: Job[RLRunConfig, RLPlan], models: Models, store: SampleStore
) -> TailPasses | None:
    """Build the passes during rollouts; ``None`` where there are none. Collective: the world."""
    passes = job.config.rl.tail_passes
    if not passes:
        return None
    of_pass: dict[str, TrainEngine | BaseModel] = {"old": models.policy}
    if models.reference is not None:
        of_pass["reference"] = models.reference
    parallel, rank = job.plan.parallel, job.world.rank
    own = None
    for dp in range(parallel.dp):
        ranks = [r for r in range(parallel.world) if parallel.coords(r).dp == dp]
        group = dist.new_group(ranks, backend="gloo", group_desc="REPLICA")
        if rank in ranks:
            own = group
    assert own is not None
    return TailPasses(
        {name: of_pass[name] for name in passes},
        store.rules,
        own,
        leads_engine=job.plan.engine.tp_rank(rank) == 0,
        drop_truncated=store.drop_truncated,
    )


def single_row_logprobs(
    store: SampleStore, name: str, model: TrainEngine | BaseModel, batches: StepBatches
) -> list[torch.Tensor | None]:
    """Return a model's log-probs of each micro-batch; ``None`` off the last stage.

    Those of samples that have none yet are computed, in a row for each sample. Collective: the
    pipeline and tensor-parallel groups.

    Args:
        store: Has the tokens of the samples.
        name: Name of the pass, which says in which column early log-probs came.
        model: Its model.
        batches: Batches of the step.
    """
    placed, column = batches.placed, EARLY_COLUMNS[name]
    came = column in store.columns
    place = {sample.sample_id: i for i, sample in enumerate(placed.samples)}
    found: list[torch.Tensor | None] = []
    for update in batches.updates:
        items = [place[i] for micro in update.micro_batches for i in micro.sample_ids]
        missing = [
            i
            for i in items
            if not (came and placed.samples[i].has_early) and store.num_trained(placed.samples[i])
        ]
        computed: dict[int, torch.Tensor] = {}
        if missing:
            rows = model.prepare(store.pack_alone(placed, missing))
            values = model.logprobs(rows)
            computed = {
                placed.samples[i].sample_id: v
                for i, v in zip(missing, values, strict=False)  # the rest of the rows is empty
                if v is not None
            }
        found += [
            _of_micro_batch(micro, computed, column) if model.is_last_stage else None
            for micro in update.micro_batches
        ]
    return found


def _of_micro_batch(
    micro: MicroBatch, computed: dict[int, torch.Tensor], column: Column
) -> torch.Tensor:
    """Return [N] fp32: what was computed now, and for other samples what came with their tokens."""
    nothing = torch.zeros(micro.sequence_of.numel(), device=micro.sequence_of.device)
    came = torch.split(micro.columns.get(column.name, nothing), [*micro.num_trained])
    parts = [computed.get(i, part) for i, part in zip(micro.sample_ids, came, strict=True)]
    return torch.cat(parts) if parts else nothing
