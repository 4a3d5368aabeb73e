"""The tokens of samples: kept where they were sampled, moved once to where they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mindspeed_rl.observability.metrics import Max, MetricSet, Total
from mindspeed_rl.rl import training
from mindspeed_rl.rl.build import RLJob
from mindspeed_rl.rl.rollouts import num_copies
from mindspeed_rl.samples.device_cache import LOGPROBS, TOKENS, Column, TensorCache
from mindspeed_rl.samples.exchange import GroupWire, Parcel, Redistribution, num_words
from mindspeed_rl.samples.packing import TrainSample
from mindspeed_rl.samples.placement import MicroBatchPlan
from mindspeed_rl.samples.rollout_info import Sample, SampleKey
from mindspeed_rl.samples.routes import Holders, Leg, copies_moved, plan_gather, plan_legs
from mindspeed_rl.trainer import parallel_state
from mindspeed_rl.trainer.prepared import PreparedBatch
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.types import Rollout

COLUMNS = (TOKENS, LOGPROBS)


@dataclass(frozen=True, slots=True)
class Response:
    """What was said in a sample.

    Attributes:
        token_ids: [n] int64.
        logprobs: [n] fp32, the engine's.
        loss_mask: [n] bool, the tokens that the model sampled; ``None``: all.
        experts: [n, layers with experts x k], the engine's; ``None``: they are not kept.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    loss_mask: torch.Tensor | None = None
    experts: torch.Tensor | None = None


def experts_column(run: RLJob) -> Column | None:
    """The engine's experts of every token of a response, where they are replayed. Local."""
    if run.config.rl.rl_routing_replay != "rollout":
        return None
    spec = run.plan.spec
    assert spec.moe is not None, "refused before the run"
    dtype = torch.uint8 if spec.num_experts <= 256 else torch.int16
    return Column("experts", dtype, len(spec.expert_layers) * spec.moe.top_k)


def store(
    cache: TensorCache,
    rollouts: Sequence[Rollout],
    samples: Sequence[Sample],
    experts: Column | None = None,
) -> None:
    """Keep what this rank's engine sampled: one copy to the device for each tensor. Local.

    Args:
        cache: of this rank.
        rollouts: of its engine.
        samples: the table of all, by sample id.
        experts: of :func:`experts_column`.
    """
    mine = [samples[r.sample_id] for r in rollouts]
    texts = [r.completion for r in rollouts]
    tokens = [
        t if sampled else ~t
        for text in texts
        for t, sampled in zip(
            text.token_ids, text.loss_mask or (True,) * len(text.token_ids), strict=True
        )
    ]
    logprobs = [value for text in texts for value in text.logprobs]
    columns = [(TOKENS, torch.tensor(tokens, dtype=torch.int32))]
    columns.append((LOGPROBS, torch.tensor(logprobs, dtype=torch.float32)))
    if experts is not None:
        routed = b"".join(text.experts for text in texts if text.experts is not None)
        columns.append((experts, _numbers(routed, experts.dtype)))
    _put(cache, mine, columns)


def _numbers(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of what bytes say; torch refuses to look at none."""
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.zeros(0, dtype=dtype)


def store_responses(
    cache: TensorCache, responses: Sequence[Response], samples: Sequence[Sample]
) -> None:
    """Keep responses that a checkpoint brought back. Local."""
    if responses:
        tokens = torch.cat([_marked(r) for r in responses])
        logprobs = torch.cat([r.logprobs for r in responses]).to(torch.float32)
        _put(cache, samples, [(TOKENS, tokens), (LOGPROBS, logprobs)])


def _marked(response: Response) -> torch.Tensor:
    ids, mask = response.token_ids, response.loss_mask
    return (ids if mask is None else torch.where(mask, ids, ~ids)).to(torch.int32)


def _put(
    cache: TensorCache, samples: Sequence[Sample], columns: Sequence[tuple[Column, torch.Tensor]]
) -> None:
    for column, values in columns:
        cache.put(
            column,
            [s.key for s in samples],
            values,
            [s.num_tokens for s in samples],
            [s.weights_version for s in samples],
        )


def holders_of(run: RLJob, samples: Sequence[Sample]) -> Holders:
    """Where the tokens of samples are: on all tensor ranks of an engine group, or on its first.

    Conversations are held by the rank that leads the group alone.
    """
    engine = run.plan.engine
    first = [s.group * engine.tp * engine.pp for s in samples]
    return Holders(first, num_copies(run))


@dataclass(frozen=True, slots=True)
class Placed:
    """The samples of an RL step on the ranks that train on them.

    Attributes:
        samples: of the step.
        plans: of each optimizer step, for consecutive ``samples_per_update`` samples.
        destinations: the data-parallel rank that trains on each sample.
        moved: has the tokens of this rank's.
        metrics: what moving them took.
    """

    samples: Sequence[Sample]
    plans: Sequence[MicroBatchPlan]
    destinations: Sequence[int]
    moved: Redistribution
    metrics: MetricSet

    def keys_on(self, dp: int) -> set[SampleKey]:
        """The samples that the ranks of a data-parallel rank have now."""
        pairs = zip(self.samples, self.destinations, strict=True)
        return {sample.key for sample, of in pairs if of == dp}


def pack_placed(
    run: RLJob,
    placed: Placed,
    engine: TrainEngine,
    *,
    drop_truncated: bool = False,
    at_the_end: bool = False,
) -> list[list[PreparedBatch]]:
    """The micro-batches of this rank for every optimizer step. Local.

    Args:
        run: the run.
        placed: its samples.
        engine: whose passes they are for.
        drop_truncated: nothing of a response that was cut is trained on.
        at_the_end: the one place of interest is behind the last token of each sequence.
    """
    at, size = run.plan.parallel.coords(run.rank), run.plan.batch.samples_per_update
    needed = at.pp in stages_of(run)
    experts = experts_column(run)

    def train_samples(items: Sequence[int]) -> list[TrainSample]:
        samples = [placed.samples[i] for i in items]
        prompts = _prompts(run, samples)
        if not needed:  # only lengths matter to a stage between
            sizes = [p.numel() for p in prompts]
            return [
                TrainSample(s.sample_id, prompts[0].new_zeros(size + s.num_tokens), size)
                for s, size in zip(samples, sizes, strict=True)
            ]
        responses = responses_in(placed.moved, items, samples, experts)
        if at_the_end:
            return [
                TrainSample(s.sample_id, ids, ids.numel(), token_after=0)
                for s, ids in zip(samples, _joined(prompts, responses), strict=True)
            ]
        return as_train_samples(samples, prompts, responses, drop_truncated)

    result = []
    for number, plan in enumerate(placed.plans):
        mine = [i for micro in plan.assignment[at.dp] for i in micro]
        found = train_samples([number * size + i for i in mine])
        known = dict(zip(mine, found, strict=True))
        result.append(training.pack_planned(run.job, engine, plan, known))
    return result


def as_train_samples(
    samples: Sequence[Sample],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[Response],
    drop_truncated: bool = False,
) -> list[TrainSample]:
    """Prompts and responses as sequences to train on. Local.

    With ``drop_truncated`` nothing of a response that was cut is trained on.
    """
    result = []
    joined = _joined(prompts, responses)
    for sample, prompt, response, ids in zip(samples, prompts, responses, joined, strict=True):
        logprobs, mask, experts = response.logprobs, response.loss_mask, response.experts
        num_read = prompt.numel()
        if drop_truncated and not sample.stopped:
            num_read, logprobs, mask = ids.numel(), logprobs[:0], None
            experts = None if experts is None else experts[:0]
        if mask is not None:
            assert experts is None, "experts of a conversation"
            logprobs = logprobs[mask]
        result.append(
            TrainSample(sample.sample_id, ids, num_read, logprobs, loss_mask=mask, experts=experts)
        )
    return result


def _joined(
    prompts: Sequence[torch.Tensor], responses: Sequence[Response]
) -> Sequence[torch.Tensor]:
    """[prompt + response] int64 of each sample: views of one tensor."""
    if not prompts:
        return []
    parts = [ids for p, r in zip(prompts, responses, strict=True) for ids in (p, r.token_ids)]
    sizes = [p.numel() + r.token_ids.numel() for p, r in zip(prompts, responses, strict=True)]
    return torch.split(torch.cat(parts), sizes)


def num_trained(run: RLJob, sample: Sample) -> int:
    """Tokens of a sample in the loss, as all ranks know them. Local."""
    drop = run.config.sampling.rl_overlong_filtering and not sample.stopped
    return 0 if drop else sample.num_sampled


def _prompts(run: RLJob, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """[n] int64 token ids of the prompt of each sample, in one copy to the device. Local."""
    indices = sorted({s.prompt_index for s in samples})
    ids = [run.prompts[i].token_ids for i in indices]
    flat = torch.tensor([t for prompt in ids for t in prompt], dtype=torch.int64)
    parts = torch.split(flat.to(run.job.platform.device), [len(prompt) for prompt in ids])
    known = dict(zip(indices, parts, strict=True))
    return [known[s.prompt_index] for s in samples]


def prompt_lengths(run: RLJob, samples: Sequence[Sample]) -> dict[int, int]:
    """Tokens of the prompts of samples, by index. Local."""
    return {i: len(run.prompts[i].token_ids) for i in {s.prompt_index for s in samples}}


def stages_of(run: RLJob) -> range | tuple[int, ...]:
    """The pipeline stages that look at tokens: the first and the last.

    All stages where there are experts: how far they agree is counted over trained tokens.
    """
    pp = run.plan.parallel.pp
    return range(pp) if run.plan.spec.moe else tuple(sorted({0, pp - 1}))


def place(run: RLJob, samples: Sequence[Sample], cache: TensorCache | None = None) -> Placed:
    """Decide who trains on what, and move the tokens there. Collective: the training grid.

    Every rank computes the same plans from the sample table: balance first, then as few bytes as
    that allows. All optimizer steps of the RL step move together.

    Args:
        run: the run.
        samples: of the step.
        cache: where their tokens are, if not in the run's.
    """
    size = run.plan.batch.samples_per_update
    read = prompt_lengths(run, samples)
    lengths = [read[s.prompt_index] + s.num_tokens for s in samples]
    holders = holders_of(run, samples)
    one_node = run.job.world.local_size == run.job.world.size
    layout, stages = run.plan.parallel, stages_of(run)
    copies = copies_moved(holders, len(samples), layout, stages)
    experts = experts_column(run)
    columns = COLUMNS if experts is None else (*COLUMNS, experts)
    words_of = {n: num_words(columns, n) for n in {s.num_tokens for s in samples}}
    words = [words_of[s.num_tokens] for s in samples]
    moved_words = copies * np.asarray(words, dtype=np.int64).reshape(-1, 1)
    plans = [
        training.plan_batches(
            run.job, lengths[start : start + size], moved_words[start : start + size]
        )
        for start in range(0, len(samples), size)
    ]
    destinations = [0] * len(samples)
    for number, plan in enumerate(plans):
        for dp, mine in enumerate(plan.assignment):
            for i in (i for micro in mine for i in micro):
                destinations[number * size + i] = dp
    legs = plan_legs(holders, destinations, layout, stages, run.rank, one_node=one_node)
    moved, metrics = _move(run, samples, legs, cache or run.cache, columns)
    moved.keep()
    return Placed(samples, plans, destinations, moved, metrics)


def fetch(run: RLJob, samples: Sequence[Sample], placed: Placed | None = None) -> list[Response]:
    """The responses of samples on rank 0, on the host; nothing elsewhere. Collective: the world.

    Those that ``placed`` brought to rank 0, the first of the first stage, do not move again.
    """
    there = placed.keys_on(run.plan.parallel.coords(0).dp) if placed else ()
    known = holders_of(run, samples)
    first = [0 if s.key in there else at for s, at in zip(samples, known.first, strict=True)]
    legs = plan_gather(Holders(first, known.count), 0, run.job.world.size, run.rank)
    moved, _ = _move(run, samples, legs, run.cache)
    if run.rank:
        return []
    found = responses_in(moved, range(len(samples)), samples)
    return [
        replace(
            r,
            token_ids=r.token_ids.cpu(),
            logprobs=r.logprobs.cpu(),
            loss_mask=None if r.loss_mask is None else r.loss_mask.cpu(),
        )
        for r in found
    ]


def _move(
    run: RLJob,
    samples: Sequence[Sample],
    legs: Sequence[Leg],
    cache: TensorCache,
    columns: Sequence[Column] = COLUMNS,
) -> tuple[Redistribution, MetricSet]:
    moved = Redistribution(cache, [Parcel.of(s) for s in samples], columns, legs)
    wire = GroupWire(parallel_state.group_along)
    moved.run(wire)
    metrics = MetricSet(
        {
            "exchange/sent_bytes": Total(float(wire.sent_bytes)),
            "exchange/collectives": Max(float(wire.num_collectives)),
        }
    )
    return moved, metrics


def responses_in(
    moved: Redistribution,
    items: Sequence[int],
    samples: Sequence[Sample],
    experts: Column | None = None,
) -> list[Response]:
    """Responses that were here or have arrived, on the device: views of one tensor each. Local.

    Args:
        moved: what has arrived.
        items: positions in its plan.
        samples: their rows of the sample table.
        experts: of :func:`experts_column`.

    Raises:
        RuntimeError: one is not here.
    """
    sizes = [s.num_tokens for s in samples]
    tokens, logprobs = moved.read_all(items, TOKENS), moved.read_all(items, LOGPROBS)
    ids = tokens.to(torch.int64)
    if all(s.num_sampled == s.num_tokens for s in samples):
        routed: Sequence[torch.Tensor | None] = [None] * len(sizes)
        if experts is not None:
            rows = moved.read_all(items, experts).view(-1, experts.width)
            routed = torch.split(rows, sizes)
        said = zip(torch.split(ids, sizes), torch.split(logprobs, sizes), routed, strict=True)
        return [Response(own, logp, experts=chosen) for own, logp, chosen in said]
    assert experts is None, "experts of a conversation are not kept"
    sampled = ids >= 0
    marked = zip(
        torch.split(torch.where(sampled, ids, ~ids), sizes),
        torch.split(logprobs, sizes),
        torch.split(sampled, sizes),
        samples,
        strict=True,
    )
    return [
        Response(own, logp, None if s.num_sampled == s.num_tokens else mask)
        for own, logp, mask, s in marked
    ]
