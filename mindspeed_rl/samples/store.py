"""The tokens of a step's samples on this rank: kept where they were sampled, moved, packed.

Every rank knows the sample table, so every rank computes the same plans: which rank trains on what,
and the route of each sample. Tokens move once, from the rank that sampled them to the ranks that
train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.types import Rollout, TrainSample
from mindspeed_rl.metrics.metric_set import Max, MetricSet, Total
from mindspeed_rl.metrics.names import REAL_SHARE
from mindspeed_rl.packing.micro_batches import MicroBatchPlan, real_share
from mindspeed_rl.samples.columns import LOSS_MASK, TOKEN_IDS, Column
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import (
    Hop,
    OwnerRanks,
    Redistribution,
    copies_moved,
    plan_gather,
    plan_hops,
    sample_words,
)
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.placement import BatchRules
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey

ResponseTensors = Mapping[str, torch.Tensor]
"""The tokens of one response, [n] or [n, width] by the name of a column; token ids are int64."""


@dataclass(frozen=True, slots=True)
class PlacedSamples:
    """The samples of an RL step on the ranks that train on them.

    Attributes:
        samples: Samples of the step.
        plans: Plan of each optimizer step, for consecutive ``samples_per_update`` samples.
        destinations: Data-parallel rank that trains on each sample.
        moved: Redistribution that has the tokens of this rank's samples.
        metrics: Bytes and collectives that moving them took.
    """

    samples: Sequence[RolloutInfo]
    plans: Sequence[MicroBatchPlan]
    destinations: Sequence[int]
    moved: Redistribution
    metrics: MetricSet

    def keys_on(self, dp: int) -> set[SampleKey]:
        """Return the keys of the samples that the ranks of a data-parallel rank have now."""
        pairs = zip(self.samples, self.destinations, strict=True)
        return {sample.key for sample, of in pairs if of == dp}


@dataclass(frozen=True, slots=True)
class SampleStore:
    """Keeps, moves and packs the tokens of samples on this rank.

    Attributes:
        rank: Global rank.
        parallel: Training layout.
        engine: Layout of the engine.
        prompt_tokens: Returns the token ids of a prompt of the data set; every rank has it, so they
            never travel.
        rules: Rules by which samples become micro-batches.
        samples_per_update: Number of samples of one optimizer step.
        cache: Tokens that this rank's engine sampled, and those that other ranks sent.
        num_copies: Number of ranks of an engine that have each sample.
        stages: Pipeline stages that read tokens.
        one_node: Whether all ranks are on one node.
        columns: Columns that are kept for every token of a response.
        drop_truncated: Whether responses cut at the limit are excluded from training.
        group_along: Function that returns this rank's process group along a training-grid axis.
    """

    rank: int
    parallel: ParallelLayout
    engine: EngineLayout
    prompt_tokens: Callable[[int], Sequence[int]]
    rules: BatchRules
    samples_per_update: int
    cache: TensorCache
    num_copies: int
    stages: Collection[int]
    one_node: bool
    columns: tuple[Column, ...]
    drop_truncated: bool
    group_along: Callable[[str], dist.ProcessGroup | None]

    def begin_step(self, step: int, carried: Sequence[RolloutInfo]) -> None:
        """Drop the tokens of earlier steps, except those of ``carried`` samples. Local."""
        self.cache.begin_step(step, [s.key for s in carried])

    def keep(self, rollouts: Sequence[Rollout], samples: Sequence[RolloutInfo]) -> None:
        """Keep what this rank's engine sampled: see :func:`keep_rollouts`. Local."""
        keep_rollouts(self.cache, self.columns, rollouts, samples)

    def keep_responses(
        self, responses: Sequence[ResponseTensors], samples: Sequence[RolloutInfo]
    ) -> None:
        """Keep those of the responses, one for each sample, that this rank owns. Local."""
        owner_ranks = self.owner_ranks(samples)
        mine = [
            i
            for i, first in enumerate(owner_ranks.first)
            if 0 <= self.rank - first < owner_ranks.count
        ]
        if mine:
            values = {
                column.name: torch.cat([responses[i][column.name] for i in mine]).flatten()
                for column in self.columns
            }
            _put(self.cache, self.columns, [samples[i] for i in mine], values)

    def owner_ranks(self, samples: Sequence[RolloutInfo]) -> OwnerRanks:
        """Return the ranks that have samples: all tensor ranks of an engine, or its first.

        Conversations are held only by the rank that leads the engine.
        """
        first = [self.engine.first_rank_of(s.group) for s in samples]
        return OwnerRanks(first, self.num_copies)

    def num_prompt_tokens(self, sample: RolloutInfo) -> int:
        return len(self.prompt_tokens(sample.prompt_index))

    def num_trained(self, sample: RolloutInfo) -> int:
        """Return the number of a sample's tokens in the loss, as all ranks know it. Local."""
        return 0 if self.drop_truncated and not sample.stopped else sample.num_sampled

    def place(self, samples: Sequence[RolloutInfo]) -> PlacedSamples:
        """Decide which rank trains on what, and move the tokens. Collective: the training grid.

        Balance has priority; among balanced placements few bytes are moved. All optimizer steps of
        the RL step move together.
        """
        size = self.samples_per_update
        lengths = [self.num_prompt_tokens(s) + s.num_tokens for s in samples]
        owner_ranks = self.owner_ranks(samples)
        copies = copies_moved(owner_ranks, self.parallel, self.stages)
        words = np.asarray(sample_words(self.columns, samples), dtype=np.int64)
        moved_words = copies * words.reshape(-1, 1)
        plans = [
            self.rules.plan(lengths[start : start + size], moved_words[start : start + size])
            for start in range(0, len(samples), size)
        ]
        destinations = [0] * len(samples)
        for number, plan in enumerate(plans):
            for dp, mine in enumerate(plan.assignment):
                for i in (i for micro in mine for i in micro):
                    destinations[number * size + i] = dp
        hops = plan_hops(
            owner_ranks, destinations, self.parallel, self.stages, self.rank, one_node=self.one_node
        )
        moved, metrics = self._move(samples, hops, self.columns)
        moved.keep()
        metrics = metrics.merge({REAL_SHARE: Max(real_share(plans, lengths))})
        return PlacedSamples(samples, plans, destinations, moved, metrics)

    def fetch(
        self,
        samples: Sequence[RolloutInfo],
        placed: PlacedSamples | None = None,
        columns: Sequence[Column] | None = None,
    ) -> list[ResponseTensors]:
        """Bring responses to the host of rank 0; other ranks get an empty list. Collective: world.

        Args:
            samples: Samples whose responses are wanted.
            placed: Samples that it brought to rank 0, the first of the first stage, do not move
                again.
            columns: Columns that are wanted; all columns by default.
        """
        wanted = self.columns if columns is None else columns
        there = placed.keys_on(self.parallel.coords(0).dp) if placed else ()
        known = self.owner_ranks(samples)
        first = [0 if s.key in there else at for s, at in zip(samples, known.first, strict=True)]
        hops = plan_gather(OwnerRanks(first, known.count), 0, self.parallel.world, self.rank)
        moved, _ = self._move(samples, hops, wanted)
        if self.rank:
            return []
        found = responses_in(moved, range(len(samples)), samples, wanted)
        return [{name: values.cpu() for name, values in r.items()} for r in found]

    def _move(
        self, samples: Sequence[RolloutInfo], hops: Sequence[Hop], columns: Sequence[Column]
    ) -> tuple[Redistribution, MetricSet]:
        moved = Redistribution(self.cache, samples, columns, hops)
        moved.run(self.group_along)
        metrics = MetricSet(
            {
                "exchange/sent_bytes": Total(float(moved.sent_bytes)),
                "exchange/collectives": Max(float(len(hops))),
            }
        )
        return moved, metrics

    def pack(
        self, placed: PlacedSamples, *, drop_truncated: bool = False, at_the_end: bool = False
    ) -> list[list[MicroBatch]]:
        """Pack the micro-batches of this rank for every optimizer step. Local.

        Args:
            placed: Samples on the ranks that train on them.
            drop_truncated: Exclude responses that were cut, if the run asks for that.
            at_the_end: Mark only the end of each sequence as trained: a reward model scores it
                there.
        """
        result = []
        for number, plan in enumerate(placed.plans):
            mine = self.rules.mine(plan)
            items = [number * self.samples_per_update + i for i in mine]
            found = self._train_samples(placed, items, drop_truncated, at_the_end)
            result.append(self.rules.pack(plan, dict(zip(mine, found, strict=True))))
        return result

    def pack_alone(self, placed: PlacedSamples, items: Sequence[int]) -> list[MicroBatch]:
        """Pack samples that this rank trains on into a row each. Local.

        Args:
            placed: Samples on the ranks that train on them.
            items: Positions of the samples; the rows that a pass needs besides are empty.
        """
        found = self._train_samples(placed, items, drop_truncated=True, at_the_end=False)
        return self.rules.pack_alone(found)

    def _train_samples(
        self, placed: PlacedSamples, items: Sequence[int], drop_truncated: bool, at_the_end: bool
    ) -> list[TrainSample]:
        samples = [placed.samples[i] for i in items]
        prompts = self._prompt_tokens(samples)
        if self.parallel.coords(self.rank).pp not in self.stages:
            # Stages that read no tokens need only the lengths.
            return [
                TrainSample(
                    s.sample_id, p.new_zeros(p.numel() + s.num_tokens), num_prompt_tokens=p.numel()
                )
                for s, p in zip(samples, prompts, strict=True)
            ]
        responses = responses_in(placed.moved, items, samples, self.columns)
        if at_the_end:
            return [
                TrainSample(s.sample_id, ids, ids.numel(), token_after=0)
                for s, ids in zip(samples, _joined(prompts, responses), strict=True)
            ]
        return as_train_samples(samples, prompts, responses, drop_truncated and self.drop_truncated)

    def _prompt_tokens(self, samples: Sequence[RolloutInfo]) -> list[torch.Tensor]:
        """Return [n] int64 token ids of each sample's prompt, copied to the device once. Local."""
        indices = sorted({s.prompt_index for s in samples})
        ids = [self.prompt_tokens(i) for i in indices]
        flat = torch.tensor([t for prompt in ids for t in prompt], dtype=torch.int64)
        parts = torch.split(flat.to(self.cache.device), [len(prompt) for prompt in ids])
        known = dict(zip(indices, parts, strict=True))
        return [known[s.prompt_index] for s in samples]


def responses_in(
    moved: Redistribution,
    items: Sequence[int],
    samples: Sequence[RolloutInfo],
    columns: Sequence[Column],
) -> list[ResponseTensors]:
    """Return responses that this rank had or received, as views of one tensor per column. Local.

    Args:
        moved: Redistribution with what has arrived.
        items: Positions in its plan.
        samples: Rows of the sample table at these positions.
        columns: Columns that are wanted.

    Raises:
        RuntimeError: A response is not on this rank.
    """
    sizes = [s.num_tokens for s in samples]
    parts: dict[str, Sequence[torch.Tensor]] = {}
    for column in columns:
        values = moved.read_all(items, column)
        if column is TOKEN_IDS:
            values = values.to(torch.int64)
        if column is LOSS_MASK:
            values = values.cpu()  # indices are made of it
        if column.width > 1:
            values = values.view(-1, column.width)
        parts[column.name] = torch.split(values, sizes)
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def keep_rollouts(
    cache: TensorCache,
    columns: Sequence[Column],
    rollouts: Sequence[Rollout],
    samples: Sequence[RolloutInfo],
) -> None:
    """Keep what this rank's engine sampled: one copy to the device for each column. Local.

    Args:
        cache: Cache of this rank.
        columns: Columns that are kept for every token.
        rollouts: Rollouts of this rank's engine.
        samples: Table of all samples, by sample id.
    """
    completions = [r.completion for r in rollouts]
    values = {column.name: column.gather(completions) for column in columns}
    _put(cache, columns, [samples[r.sample_id] for r in rollouts], values)


def _put(
    cache: TensorCache,
    columns: Sequence[Column],
    samples: Sequence[RolloutInfo],
    values: Mapping[str, torch.Tensor],
) -> None:
    for column in columns:
        cache.put(
            column,
            [s.key for s in samples],
            values[column.name],
            [s.num_tokens for s in samples],
            [s.weights_version for s in samples],
        )


def as_train_samples(
    samples: Sequence[RolloutInfo],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[ResponseTensors],
    drop_truncated: bool = False,
) -> list[TrainSample]:
    """Join prompts and responses into sequences to train on. Local.

    With ``drop_truncated``, nothing of a response that was cut is trained on.
    """
    result = []
    joined = _joined(prompts, responses)
    for sample, prompt, response, ids in zip(samples, prompts, responses, joined, strict=True):
        columns = {n: v for n, v in response.items() if n not in (TOKEN_IDS.name, LOSS_MASK.name)}
        mask, num_read = response.get(LOSS_MASK.name), prompt.numel()
        if drop_truncated and not sample.stopped:
            num_read, mask = ids.numel(), None
            columns = {name: values[:0] for name, values in columns.items()}
        if mask is not None:
            own = mask.nonzero()[:, 0].to(ids.device)
            columns = {name: values.index_select(0, own) for name, values in columns.items()}
        result.append(TrainSample(sample.sample_id, ids, num_read, columns, loss_mask=mask))
    return result


def _joined(
    prompts: Sequence[torch.Tensor], responses: Sequence[ResponseTensors]
) -> Sequence[torch.Tensor]:
    """Join prompt and response of each sample into [n] int64, as views of one tensor."""
    if not prompts:
        return []
    parts = [ids for p, r in zip(prompts, responses, strict=True) for ids in (p, r[TOKEN_IDS.name])]
    sizes = [p.numel() + r[TOKEN_IDS.name].numel() for p, r in zip(prompts, responses, strict=True)]
    return torch.split(torch.cat(parts), sizes)
