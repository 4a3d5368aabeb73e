"""The tokens of a step's samples on this rank: kept where they were sampled, moved, packed.

Every rank knows the sample table, so every rank computes the same plans: who trains on what, and
which way each sample goes. Tokens move once, from the rank that sampled them to the ranks that
train on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.types import Prompt, Rollout
from mindspeed_rl.metrics.metric_set import Max, MetricSet, Total
from mindspeed_rl.samples.batching import BatchRules
from mindspeed_rl.samples.columns import LOSS_MASK, TOKEN_IDS, Column
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import GroupWire, Redistribution, SampleMessage, num_words
from mindspeed_rl.samples.packing import MicroBatch, TrainSample
from mindspeed_rl.samples.placement import MicroBatchPlan
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.routes import Hop, OwnerRanks, copies_moved, plan_gather, plan_hops

ResponseTensors = Mapping[str, torch.Tensor]
"""The tokens of one response, [n] or [n, width] by the name of a column; token ids are int64."""


@dataclass(frozen=True, slots=True)
class PlacedSamples:
    """The samples of an RL step on the ranks that train on them.

    Attributes:
        samples: of the step.
        plans: of each optimizer step, for consecutive ``samples_per_update`` samples.
        destinations: the data-parallel rank that trains on each sample.
        moved: has the tokens of this rank's.
        metrics: what moving them took.
    """

    samples: Sequence[RolloutInfo]
    plans: Sequence[MicroBatchPlan]
    destinations: Sequence[int]
    moved: Redistribution
    metrics: MetricSet

    def keys_on(self, dp: int) -> set[SampleKey]:
        """The samples that the ranks of a data-parallel rank have now."""
        pairs = zip(self.samples, self.destinations, strict=True)
        return {sample.key for sample, of in pairs if of == dp}


@dataclass(frozen=True, slots=True)
class SampleStore:
    """Keeps, moves and packs the tokens of samples on this rank.

    Attributes:
        rank: global rank.
        parallel: the training layout.
        engine: the engine's layout.
        prompts: the data set; every rank has it, so prompt tokens never travel.
        rules: how samples become micro-batches.
        samples_per_update: samples of one optimizer step.
        cache: the tokens that this rank's engine sampled, and those that came here.
        num_copies: ranks of an engine that have each sample.
        stages: pipeline stages that look at tokens.
        one_node: all ranks are on one node.
        columns: what is kept of every token of a response.
        drop_truncated: nothing of a response that was cut at the limit is trained on.
        group_along: process group of an axis of the training grid that this rank is in.
    """

    rank: int
    parallel: ParallelLayout
    engine: EngineLayout
    prompts: Sequence[Prompt]
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
        """Drop the tokens of earlier steps, but for those of ``carried`` samples. Local."""
        self.cache.begin_step(step, [s.key for s in carried])

    def keep(self, rollouts: Sequence[Rollout], samples: Sequence[RolloutInfo]) -> None:
        """Keep what this rank's engine sampled: see :func:`keep_rollouts`. Local."""
        keep_rollouts(self.cache, self.columns, rollouts, samples)

    def keep_responses(
        self, responses: Sequence[ResponseTensors], samples: Sequence[RolloutInfo]
    ) -> None:
        """Keep the responses, one for each sample, of which this rank is a holder. Local."""
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
        """Where the tokens of samples are: on all tensor ranks of an engine, or on its first.

        Conversations are held by the rank that leads the engine alone.
        """
        first = [s.group * self.engine.tp * self.engine.pp for s in samples]
        return OwnerRanks(first, self.num_copies)

    def num_prompt_tokens(self, sample: RolloutInfo) -> int:
        """Tokens of the prompt of a sample."""
        return len(self.prompts[sample.prompt_index].token_ids)

    def num_trained(self, sample: RolloutInfo) -> int:
        """Tokens of a sample in the loss, as all ranks know them. Local."""
        return 0 if self.drop_truncated and not sample.stopped else sample.num_sampled

    def place(
        self, samples: Sequence[RolloutInfo], cache: TensorCache | None = None
    ) -> PlacedSamples:
        """Decide who trains on what, and move the tokens there. Collective: the training grid.

        Balance comes first, then as few bytes as that allows. All optimizer steps of the RL step
        move together.

        Args:
            samples: of the step.
            cache: where their tokens are, if not in this store's.
        """
        size = self.samples_per_update
        lengths = [self.num_prompt_tokens(s) + s.num_tokens for s in samples]
        owner_ranks = self.owner_ranks(samples)
        copies = copies_moved(owner_ranks, len(samples), self.parallel, self.stages)
        words_of = {n: num_words(self.columns, n) for n in {s.num_tokens for s in samples}}
        words = np.asarray([words_of[s.num_tokens] for s in samples], dtype=np.int64)
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
        moved, metrics = self._move(samples, hops, cache or self.cache, self.columns)
        moved.keep()
        return PlacedSamples(samples, plans, destinations, moved, metrics)

    def fetch(
        self,
        samples: Sequence[RolloutInfo],
        placed: PlacedSamples | None = None,
        columns: Sequence[Column] | None = None,
    ) -> list[ResponseTensors]:
        """The responses of samples on rank 0, on the host; nothing elsewhere. Collective: world.

        Args:
            samples: whose.
            placed: samples that it brought to rank 0, the first of the first stage, do not move
                again.
            columns: what is wanted of them; all columns by default.
        """
        wanted = self.columns if columns is None else columns
        there = placed.keys_on(self.parallel.coords(0).dp) if placed else ()
        known = self.owner_ranks(samples)
        first = [0 if s.key in there else at for s, at in zip(samples, known.first, strict=True)]
        hops = plan_gather(OwnerRanks(first, known.count), 0, self.parallel.world, self.rank)
        moved, _ = self._move(samples, hops, self.cache, wanted)
        if self.rank:
            return []
        found = responses_in(moved, range(len(samples)), samples, wanted)
        return [{name: values.cpu() for name, values in r.items()} for r in found]

    def _move(
        self,
        samples: Sequence[RolloutInfo],
        hops: Sequence[Hop],
        cache: TensorCache,
        columns: Sequence[Column],
    ) -> tuple[Redistribution, MetricSet]:
        moved = Redistribution(cache, [SampleMessage.of(s) for s in samples], columns, hops)
        wire = GroupWire(self.group_along)
        moved.run(wire)
        metrics = MetricSet(
            {
                "exchange/sent_bytes": Total(float(wire.sent_bytes)),
                "exchange/collectives": Max(float(wire.num_collectives)),
            }
        )
        return moved, metrics

    def pack(
        self, placed: PlacedSamples, *, drop_truncated: bool = False, at_the_end: bool = False
    ) -> list[list[MicroBatch]]:
        """The micro-batches of this rank for every optimizer step. Local.

        Args:
            placed: the samples.
            drop_truncated: leave out responses that were cut, where the run asks for that.
            at_the_end: the one place of interest is behind the last token of each sequence.
        """
        result = []
        for number, plan in enumerate(placed.plans):
            mine = self.rules.mine(plan)
            items = [number * self.samples_per_update + i for i in mine]
            found = self._train_samples(placed, items, drop_truncated, at_the_end)
            result.append(self.rules.pack(plan, dict(zip(mine, found, strict=True))))
        return result

    def _train_samples(
        self, placed: PlacedSamples, items: Sequence[int], drop_truncated: bool, at_the_end: bool
    ) -> list[TrainSample]:
        samples = [placed.samples[i] for i in items]
        prompts = self._prompt_tokens(samples)
        if self.parallel.coords(self.rank).pp not in self.stages:
            # only lengths matter to a stage between
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
        """[n] int64 token ids of the prompt of each sample, in one copy to the device. Local."""
        indices = sorted({s.prompt_index for s in samples})
        ids = [self.prompts[i].token_ids for i in indices]
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
    """Responses that were here or have arrived, on the device: views of one tensor each. Local.

    Args:
        moved: what has arrived.
        items: positions in its plan.
        samples: their rows of the sample table.
        columns: what is wanted of them.

    Raises:
        RuntimeError: one is not here.
    """
    sizes = [s.num_tokens for s in samples]
    parts: dict[str, Sequence[torch.Tensor]] = {}
    for column in columns:
        values = moved.read_all(items, column)
        if column is TOKEN_IDS:
            values = values.to(torch.int64)
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
        cache: of this rank.
        columns: what is kept of every token.
        rollouts: of this rank's engine.
        samples: the table of all, by sample id.
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
    """Prompts and responses as sequences to train on. Local.

    With ``drop_truncated`` nothing of a response that was cut is trained on.
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
            columns = {name: values[mask] for name, values in columns.items()}
        result.append(TrainSample(sample.sample_id, ids, num_read, columns, loss_mask=mask))
    return result


def _joined(
    prompts: Sequence[torch.Tensor], responses: Sequence[ResponseTensors]
) -> Sequence[torch.Tensor]:
    """[prompt + response] int64 of each sample: views of one tensor."""
    if not prompts:
        return []
    parts = [ids for p, r in zip(prompts, responses, strict=True) for ids in (p, r[TOKEN_IDS.name])]
    sizes = [p.numel() + r[TOKEN_IDS.name].numel() for p, r in zip(prompts, responses, strict=True)]
    return torch.split(torch.cat(parts), sizes)
