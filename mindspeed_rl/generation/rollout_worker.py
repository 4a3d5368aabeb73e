"""Runs one pass of generation on this rank's engine, and shares its scored samples with all."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_rl.core.types import Completion, EarlyLogprobs, Prompt, Rollout
from mindspeed_rl.generation.assignment import EngineAssignment
from mindspeed_rl.generation.multi_turn import Environments, run_conversations
from mindspeed_rl.generation.scoring import RewardFunctions, Scorer
from mindspeed_rl.metrics.generation_progress import GenerationProgress
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.rollout.stats import StepStats, record_history, step_metrics
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS, Column
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.lengths import LengthHistory
from mindspeed_rl.samples.rollout_info import (
    UNCACHED,
    Correctness,
    RolloutInfo,
    SampleKey,
    exchange_table,
)

PhaseContext = Callable[[str], AbstractContextManager[None]]
Compare = Callable[[Rollout], Correctness]
"""Whether the response of an evaluation is right."""
TailWork = Callable[[Sequence[Rollout]], Mapping[int, EarlyLogprobs]]
"""Work between the end of this rank's engine and that of the last: the rollouts of this engine ->
log-probs by sample id. Collective: the world."""


@dataclass(frozen=True, slots=True)
class PassRequest:
    """The responses that one pass of generation is to sample.

    Attributes:
        prompts: Prompts; the position in the list is the sample id.
        step: Number of the step, which seeds the samples together with ``attempt``.
        settings: Sampling settings.
        version: Version of the weights; the engine must have them.
        attempt: Number that makes other seeds for the same step.
        key: Key of sample 0, for samples that will be kept.
        lengths: Lengths of earlier responses to the prompts.
        prefixes: In partial rollouts, the beginning of each response; a response that is still
            incomplete after this pass has no reward.
        limits: Most tokens of each response, at most those of the settings; empty: as there.
    """

    prompts: Sequence[Prompt]
    step: int
    settings: SamplingSettings
    version: int
    attempt: int = 0
    key: SampleKey = UNCACHED
    lengths: LengthHistory | None = None
    prefixes: Sequence[RolloutInfo | None] = ()
    limits: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SidePass:
    """A pass whose responses are generated together with those of another.

    Attributes:
        request: Prompts, seeds and temperature; version, limit and stop tokens are the other's.
        compare: Compares a response with the answer; ``None``: nothing does.
    """

    request: PassRequest
    compare: Compare | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The samples of one pass of generation.

    Attributes:
        samples: All samples as every rank knows them, by sample id.
        rollouts: Rollouts whose tokens this rank has.
        metrics: Metrics of sampling and scoring.
        beside: Results of the passes that were generated with it; their metrics are those of
            scoring alone.
    """

    samples: list[RolloutInfo]
    rollouts: list[Rollout]
    metrics: MetricSet
    beside: tuple[GenerationResult, ...] = ()


@dataclass(frozen=True)
class RolloutWorker:
    """Generates and scores samples with the engine of this rank.

    Attributes:
        assignment: Decides which samples this engine generates.
        cache: Holds the tokens of the responses that a later pass continues.
        columns: Columns that are kept for every token of a response.
        seed: Seed of the run.
        stop_token_ids: Token ids that end a response when sampled; empty: none does.
        history_folder: Where decode steps are recorded; ``None`` on ranks that record none.
        environments: Environments of conversations; ``None``: a response has one turn.
        drafts: Responses from which the engine drafts, equal on the ranks of an engine; ``None``:
            it does not draft.
    """

    engine: InferenceEngine
    assignment: EngineAssignment
    rewards: RewardFunctions
    cache: TensorCache
    columns: tuple[Column, ...]
    seed: int
    stop_token_ids: tuple[int, ...]
    history_folder: Path | None = None
    environments: Environments | None = None
    drafts: DraftHistory | None = None

    def settings(self, temperature: float) -> SamplingSettings:
        """Return the settings that sample at a temperature; 0 is greedy."""
        return SamplingSettings(temperature, self.assignment.limit, self.stop_token_ids)

    def run(
        self,
        request: PassRequest,
        phase: PhaseContext,
        compare: Compare | None = None,
        tail: TailWork | None = None,
        beside: Sequence[SidePass] = (),
    ) -> GenerationResult:
        """Generate one scored response to each prompt of a request. Collective: the world.

        Samples are scored while others are still being generated.

        Args:
            request: Prompts, seeds and weights of the samples.
            phase: Names the parts of the pass for timer and watchdog.
            compare: Compares a response with the answer in an evaluation; all ranks learn it.
            tail: Work for ranks whose engine is done before others; ``None``: they wait.
            beside: Passes whose responses are generated in the same call of the engine; their
                results are in the result. Metrics of the engine's steps are those of all.
        """
        stats = self.engine.stats = StepStats()
        sides = [SidePass(request, compare), *beside]
        with ExitStack() as stack:
            scorers = [stack.enter_context(self.rewards.scorer()) for _ in sides]
            with phase("generate"):
                own: list[list[Rollout]] = [[] for _ in sides]
                metrics = MetricSet()
                if self.environments is None:
                    requests = [side.request for side in sides]
                    what = "generating" if compare is None else "evaluating"
                    own = self.generate_together(requests, scorers, what)
                else:
                    assert not beside, "conversations have an engine to themselves"
                    metrics = self._converse(self.environments, request, scorers[0])
            if self.history_folder is not None:
                record_history(self.history_folder, stats, self.assignment.engine.dp)
            early: Mapping[int, EarlyLogprobs] = {}
            if tail is not None:
                # Of a conversation only the rank that leads the engine knows the sample.
                done = own[0] if self.environments is None else scorers[0].samples
                with phase("tail"):
                    early = tail(done)
                own[0] = with_early(own[0], early)
            with phase("reward"):
                scored = [scorer.finish() for scorer in scorers]
                scored[0] = (with_early(scored[0][0], early), scored[0][1])
        with phase("wait"):  # for the slowest engine, so that its time is not counted as exchange
            dist.all_reduce(torch.zeros(1))
        with phase("exchange"):
            first, *others = [
                self._shared(side, mine, *found)
                for side, mine, found in zip(sides, own, scored, strict=True)
            ]
        metrics = metrics.merge(step_metrics(stats, self.assignment.engine.dp > 1))
        metrics = metrics.merge(self.assignment.metrics(stats))
        return replace(first, metrics=first.metrics.merge(metrics), beside=tuple(others))

    def _shared(
        self, side: SidePass, own: list[Rollout], rollouts: list[Rollout], metrics: MetricSet
    ) -> GenerationResult:
        """Share the samples of a pass with all ranks. Collective: the world.

        Args:
            side: The pass.
            own: Rollouts of this rank's engine, without rewards.
            rollouts: The same with rewards, on the rank that leads the engine.
            metrics: Metrics of their scoring.
        """
        compare, leads = side.compare, self.assignment.leads_engine
        samples = exchange_table(
            rollouts,
            self.assignment.engine.group_of(self.assignment.rank),
            self.rewards.names,
            len(side.request.prompts),
            side.request.key,
            {r.sample_id: compare(r) for r in rollouts} if compare else None,
            columns=self.columns,
            copies=() if leads else own,
            # Of a conversation only the rank that leads the engine knows the sample.
            num_copies=1 if self.environments else self.assignment.engine.tp,
        )
        if self.drafts is not None:
            share_responses(self.drafts, rollouts if leads else ())
        return GenerationResult(samples, rollouts if leads else own, metrics)

    def generate(self, request: PassRequest, scorer: Scorer | None = None) -> list[Rollout]:
        """Complete the prompts, and return the samples that ended on this rank's engine, by id.

        See :meth:`generate_together`.
        """
        return self.generate_together([request], [scorer])[0]

    def generate_together(
        self,
        passes: Sequence[PassRequest],
        scorers: Sequence[Scorer | None],
        what: str = "generating",
    ) -> list[list[Rollout]]:
        """Complete the prompts of passes in one call of the engine.

        Finished samples go to the scorer of their pass while others are generated. The noise of a
        token follows from seed and position, so each pass has the responses that it has alone.
        Collective: the ranks of each engine; the world where requests may move.

        Args:
            passes: Passes with the same limit, stop tokens and version of the weights.
            scorers: Scorer of each pass; ``None``: its samples are not scored.
            what: What progress is called.

        Returns:
            The samples of each pass that ended on this rank's engine, by id.
        """
        first = passes[0]
        starts = list(accumulate((len(p.prompts) for p in passes), initial=0))

        def place(number: int) -> tuple[int, int]:
            which = bisect_right(starts, number) - 1
            return which, number - starts[which]

        lengths = [
            self.assignment.expected_lengths(p.prompts, p.settings, p.lengths, p.prefixes, p.limits)
            for p in passes
        ]

        def expected(number: int, generated: int) -> int:
            which, i = place(number)
            return lengths[which](i, generated)

        own = [
            start + i
            for start, p in zip(starts, passes, strict=False)
            for i in self.assignment.own_samples(p.prompts, p.lengths, p.prefixes)
        ]
        prefixes = [x for p in passes for x in (p.prefixes or [None] * len(p.prompts))]
        requests = []
        for number in self.assignment.start_order(own, expected, prefixes):
            which, i = place(number)
            requests.append(self._request(passes[which], i, number, first.settings))

        def on_step(finished: Mapping[int, Completion]) -> None:
            progress.add(len(finished))
            for number, completion in finished.items():
                which, i = place(number)
                if (scorer := scorers[which]) is not None:
                    _score(scorer, passes[which], i, completion)

        rebalancer = self.assignment.rebalancer(expected)
        with closing(self._progress(what, len(own))) as progress:
            done = self.engine.generate(
                requests, first.settings, first.version, on_step, rebalancer
            )
        found: list[list[Rollout]] = [[] for _ in passes]
        for number in sorted(done):
            which, i = place(number)
            found[which].append(Rollout(i, passes[which].prompts[i], done[number]))
        return found

    def _progress(self, what: str, total: int) -> GenerationProgress:
        """Return the progress of this rank's engine, which rank 0 shows."""
        engine, shown = self.assignment.engine, self.assignment.rank == 0
        return GenerationProgress(what, total, engine.num_groups, shown=shown)

    def _request(
        self, part: PassRequest, i: int, number: int, settings: SamplingSettings
    ) -> GenerationRequest:
        """Return the request of sample ``i`` of a pass under a number, beside those of settings."""
        seed = request_seed(self.seed, part.step, i, part.attempt)
        most = part.limits[i] if part.limits else None
        new = GenerationRequest(number, part.prompts[i].token_ids, seed, most)
        if part.settings != settings:
            degree = part.settings.temperature
            assert replace(settings, temperature=degree) == part.settings
            new = replace(new, temperature=degree)
        return self._continued(new, part.prefixes[i]) if part.prefixes else new

    def _continued(
        self, request: GenerationRequest, prefix: RolloutInfo | None
    ) -> GenerationRequest:
        """Return the request of partial rollouts with the prefix that this rank's cache holds."""
        most = self.assignment.max_tokens(prefix)
        request = replace(request, max_tokens=most, later_tokens=self.assignment.limit - most)
        if prefix is None:
            return request
        tokens, logprobs = (
            self.cache.read(column, prefix.key, prefix.weights_version).tolist()
            for column in (TOKEN_IDS, ROLLOUT_LOGPROBS)
        )
        return replace(request, prefix_tokens=tuple(tokens), prefix_logprobs=tuple(logprobs))

    def _converse(
        self, environments: Environments, request: PassRequest, scorer: Scorer
    ) -> MetricSet:
        """Run the conversations; ``scorer`` gets each sample when its conversation is over."""
        own = self.assignment.own_samples(request.prompts)
        # The history knows lengths of conversations; turns are estimated by earlier turns.
        expected = self.assignment.expected_lengths(request.prompts, request.settings, None)

        def seed_of(sample_id: int, turn: int) -> int:
            return request_seed(self.seed, request.step, sample_id, request.attempt, turn)

        with closing(self._progress("conversations over", len(own))) as progress:
            return run_conversations(
                environments if self.assignment.leads_engine else None,
                {i: request.prompts[i] for i in own},
                self.engine,
                request.settings,
                request.version,
                seed_of,
                scorer,
                lambda visits: self.assignment.rebalancer(expected, visits),
                progress.add,
            )

    def close(self) -> None:
        if self.environments is not None:
            self.environments.runner.close()
        self.rewards.close()


def _score(scorer: Scorer, part: PassRequest, i: int, completion: Completion) -> None:
    """Give a finished sample of a pass to its scorer; one that goes on later gets no reward."""
    incomplete = (
        part.prefixes
        and completion.truncated
        and len(completion.token_ids) < part.settings.max_response_tokens
    )
    take = scorer.add_unscored if incomplete else scorer.add
    take(Rollout(i, part.prompts[i], completion))


def with_early(rollouts: Sequence[Rollout], early: Mapping[int, EarlyLogprobs]) -> list[Rollout]:
    """Return rollouts with the log-probs that are known early. Local."""
    return [
        replace(r, completion=replace(r.completion, early=early[r.sample_id]))
        if r.sample_id in early
        else r
        for r in rollouts
    ]


def share_responses(drafts: DraftHistory, rollouts: Sequence[Rollout]) -> None:
    """Add the responses of all engines to the history of each rank. Collective: the world.

    Args:
        drafts: History of this rank.
        rollouts: What this rank's engine sampled; empty on all but one of its ranks.
    """
    mine = [
        (prompt_key(r.prompt.token_ids), array("i", r.completion.token_ids).tobytes())
        for r in rollouts
    ]
    for responses in gather_objects(mine):
        for key, tokens in responses:
            drafts.add(key, array("i", tokens))
