"""Prompts to scored samples on every rank: generate, score what has finished, exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mindspeed_rl.data.lengths import LengthHistory
from mindspeed_rl.experience.samples import UNCACHED, Sample, SampleKey, exchange_table
from mindspeed_rl.observability.metrics import Mean, MetricSet
from mindspeed_rl.orchestration.engine_stats import record_history, step_metrics, take_stats
from mindspeed_rl.orchestration.rl_balance import balance_metrics, make_rebalancer, my_share
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_partial import continued
from mindspeed_rl.rewards import RewardRequest, Scoring
from mindspeed_rl.rewards.builtin.environment import ENVIRONMENT_REWARD, TRANSCRIPT
from mindspeed_rl.rollout.engine import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.types import Completion, Prompt, Rollout

#: numbers that a judge of samples gives
NUM_VERDICTS = 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of some prompts.

    Attributes:
        samples: all, as every rank knows them, by sample id.
        rollouts: those whose tokens this rank has.
        metrics: what sampling and scoring have to report.
    """

    samples: list[Sample]
    rollouts: list[Rollout]
    metrics: MetricSet


def rollouts_of(
    run: RLJob,
    prompts: Sequence[Prompt],
    step: int,
    settings: SamplingSettings,
    attempt: int = 0,
    *,
    first: SampleKey = UNCACHED,
    judge: Callable[[Rollout], Sequence[float]] | None = None,
    phase: Callable[[str], AbstractContextManager[None]] | None = None,
    lengths: LengthHistory | None = None,
    begun: Sequence[Sample | None] = (),
) -> Drawn:
    """One scored response to each of ``prompts``. Collective: the world.

    Samples are scored while others are still being generated.

    Args:
        run: the run.
        prompts: position in the list is the sample id.
        step: seeds the samples, with ``attempt``.
        settings: of the engine.
        attempt: makes other seeds for the same step.
        first: key of sample 0, for samples that will be kept.
        judge: gives :data:`NUM_VERDICTS` numbers that all ranks shall know of a sample.
        phase: names the parts for timer and watchdog; the run's, if it is not given.
        lengths: of earlier responses to the prompts.
        begun: in partial rollouts, what there is of each response; the pass lets it grow by
            ``--partial-rollout-tokens`` at most, and what goes on after it has no reward.
    """
    phase = phase or run.phase
    take_stats(run)
    with scorer_of(run) as scorer:
        with phase("generate"):
            mirrored, found = _speak(run, prompts, step, settings, attempt, scorer, lengths, begun)
        stats = take_stats(run)
        if run.rank == 0:
            record_history(run, stats)
        with phase("reward"):
            rollouts, metrics = scorer.finish()
            verdicts = {r.sample_id: judge(r) for r in rollouts} if judge else None
    with phase("wait"):  # for the slowest engine, lest its time be charged to the exchange
        dist.all_reduce(torch.zeros(1))
    with phase("exchange"):
        samples = exchange_table(
            rollouts,
            run.plan.engine.group_of(run.rank),
            run.reward_names,
            len(prompts),
            first,
            verdicts,
            NUM_VERDICTS if judge else 0,
            copies=() if run.leads_engine else mirrored,
            num_copies=num_copies(run),
        )
    metrics = metrics.merge(found).merge(step_metrics(stats, run.plan.engine.dp > 1))
    metrics = metrics.merge(balance_metrics(run, stats))
    return Drawn(samples, rollouts if run.leads_engine else mirrored, metrics)


def num_copies(run: RLJob) -> int:
    """Ranks that have each sample: a conversation is known to the rank that holds it alone."""
    return run.plan.engine.tp if run.environment is None else 1


def _speak(
    run: RLJob,
    prompts: Sequence[Prompt],
    step: int,
    settings: SamplingSettings,
    attempt: int,
    scorer: Scorer,
    lengths: LengthHistory | None,
    begun: Sequence[Sample | None],
) -> tuple[list[Rollout], MetricSet]:
    """The samples that every rank of this engine has, and metrics."""
    if run.environment is not None:
        from mindspeed_rl.orchestration.rl_episodes import converse

        return [], converse(run, prompts, step, settings, attempt, scorer)
    rollouts = generate(run, prompts, step, settings, attempt, scorer, lengths, begun)
    return rollouts, MetricSet()


class Scorer:
    """Rewards of the samples of one generation, begun as soon as each of them has finished.

    On ranks that do not lead an engine nothing is scored.
    """

    def __init__(self, run: RLJob, scoring: Scoring | None) -> None:
        self._run = run
        self._scoring = scoring
        self._rollouts: list[Rollout] = []
        self._dropped: list[Rollout] = []

    def add(self, rollout: Rollout, environment_reward: float | None = None) -> None:
        """A finished sample, and what its environment said of it."""
        if self._scoring is not None:
            self._rollouts.append(rollout)
            self._scoring.add(reward_request(self._run, rollout, environment_reward))

    def drop(self, rollout: Rollout) -> None:
        """A sample without a reward."""
        self._dropped.append(rollout)

    def finish(self) -> tuple[list[Rollout], MetricSet]:
        """Wait for the rest: the samples with their rewards, by sample id, and what went wrong."""
        if self._scoring is None:
            return [], MetricSet({name: Mean(0, 0) for name in _METRICS})
        early = self._scoring.num_done
        results = self._scoring.finish()
        scored = [
            replace(rollout, reward=result.reward, reward_parts=result.parts)
            for rollout, result in zip(self._rollouts, results, strict=True)
        ]
        errors, timeouts = (
            Mean.of(float(r.status == status) for r in results) for status in ("error", "timeout")
        )
        metrics = (errors, timeouts, Mean(float(early), float(len(results))))
        everything = sorted([*scored, *self._dropped], key=lambda rollout: rollout.sample_id)
        return everything, MetricSet(dict(zip(_METRICS, metrics, strict=True)))


# The last, the share that was scored when the last sample had been generated, is up to the machine.
_METRICS = ("reward/error_rate", "reward/timeout_rate", "throughput/scored_early")


@contextmanager
def scorer_of(run: RLJob) -> Iterator[Scorer]:
    """A scorer for one generation; what is open when it is left in an error is given up."""
    if run.rewards is None or not run.leads_engine:
        yield Scorer(run, None)
        return
    with run.rewards.scoring() as scoring:
        yield Scorer(run, scoring)


def generate(
    run: RLJob,
    prompts: Sequence[Prompt],
    step: int,
    settings: SamplingSettings,
    attempt: int = 0,
    scorer: Scorer | None = None,
    lengths: LengthHistory | None = None,
    begun: Sequence[Sample | None] = (),
) -> list[Rollout]:
    """Complete ``prompts``; position in the list is the sample id.

    ``attempt`` makes other seeds for the same step. Finished samples are handed to ``scorer`` while
    others are generated. ``lengths`` are those of earlier responses to the prompts, ``begun`` what
    there is of these. Collective: the ranks of each engine; the world where requests may move.

    Returns:
        The samples that ended on this rank's engine, by sample id.
    """
    seed = run.config.train.seed
    share = my_share(run, prompts, lengths, begun)
    requests = [
        continued(
            run,
            GenerationRequest(i, prompts[i].token_ids, request_seed(seed, step, i, attempt)),
            begun[i] if begun else None,
        )
        for i in share
    ]
    limit = settings.max_response_tokens

    def on_step(finished: Mapping[int, Completion]) -> None:
        if scorer is None:
            return
        for i, completion in finished.items():
            goes_on = begun and completion.truncated and len(completion.token_ids) < limit
            (scorer.drop if goes_on else scorer.add)(Rollout(i, prompts[i], completion))

    rebalancer = make_rebalancer(run, prompts, settings, lengths, begun)
    if rebalancer is None:
        answers = run.engine.generate(requests, settings, run.version, on_step)
        done = dict(zip(share, answers, strict=True))
    else:
        done = run.engine.generate_shared(requests, settings, run.version, on_step, rebalancer)
    return [Rollout(i, prompts[i], done[i]) for i in sorted(done)]


def response_text(run: RLJob, completion: Completion) -> str:
    """What the model said, special tokens left out; for rewards and people only."""
    return str(run.tokenizer.decode(list(completion.sampled_ids), skip_special_tokens=True))


def reward_request(
    run: RLJob, rollout: Rollout, environment_reward: float | None = None
) -> RewardRequest:
    """A sample as the rewards see it."""
    prompt, completion = rollout.prompt, rollout.completion
    metadata = prompt.metadata
    if run.environment is not None:
        said = run.tokenizer.decode(list(completion.token_ids))
        metadata = {**metadata, TRANSCRIPT: str(said), ENVIRONMENT_REWARD: environment_reward}
    return RewardRequest(
        sample_id=rollout.sample_id,
        prompt=prompt.text,
        response=response_text(run, completion),
        answer=prompt.answer,
        finish_reason=completion.finish_reason,
        num_response_tokens=len(completion.sampled_ids),
        metadata=metadata,
    )
