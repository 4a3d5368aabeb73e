"""Runs one pass of generation on this rank's engine, and shares its scored samples with all."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.generation.assignment import EngineAssignment
from mindspeed_rl.generation.multi_turn import Environments, run_conversations
from mindspeed_rl.generation.scoring import RewardFunctions, Scorer
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
class GenerationResult:
    """The samples of one pass of generation.

    Attributes:
        samples: All samples as every rank knows them, by sample id.
        rollouts: Rollouts whose tokens this rank has.
        metrics: Metrics of sampling and scoring.
    """

    samples: list[RolloutInfo]
    rollouts: list[Rollout]
    metrics: MetricSet


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
        compare: Callable[[Rollout], Correctness] | None = None,
    ) -> GenerationResult:
        """Generate one scored response to each prompt of a request. Collective: the world.

        Samples are scored while others are still being generated.

        Args:
            request: Prompts, seeds and weights of the samples.
            phase: Names the parts of the pass for timer and watchdog.
            compare: Compares a response with the answer in an evaluation; all ranks learn it.
        """
        stats = self.engine.stats = StepStats()
        with self.rewards.scorer() as scorer:
            with phase("generate"):
                if self.environments is None:
                    own, metrics = self.generate(request, scorer), MetricSet()
                else:
                    own, metrics = [], self._converse(self.environments, request, scorer)
            if self.history_folder is not None:
                record_history(self.history_folder, stats, self.assignment.engine.dp)
            with phase("reward"):
                rollouts, found = scorer.finish()
                correctness = {r.sample_id: compare(r) for r in rollouts} if compare else None
        with phase("wait"):  # for the slowest engine, so that its time is not counted as exchange
            dist.all_reduce(torch.zeros(1))
        leads = self.assignment.leads_engine
        with phase("exchange"):
            samples = exchange_table(
                rollouts,
                self.assignment.engine.group_of(self.assignment.rank),
                self.rewards.names,
                len(request.prompts),
                request.key,
                correctness,
                columns=self.columns,
                copies=() if leads else own,
                # Of a conversation only the rank that leads the engine knows the sample.
                num_copies=1 if self.environments else self.assignment.engine.tp,
            )
        if self.drafts is not None:
            with phase("exchange"):
                share_responses(self.drafts, rollouts if leads else ())
        metrics = found.merge(metrics).merge(step_metrics(stats, self.assignment.engine.dp > 1))
        metrics = metrics.merge(self.assignment.metrics(stats))
        return GenerationResult(samples, rollouts if leads else own, metrics)

    def generate(self, request: PassRequest, scorer: Scorer | None = None) -> list[Rollout]:
        """Complete the prompts, and return the samples that ended on this rank's engine, by id.

        Finished samples go to ``scorer`` while others are generated. Collective: the ranks of each
        engine; the world where requests may move.
        """
        prompts, settings, prefixes = request.prompts, request.settings, request.prefixes
        limits = request.limits
        own = self.assignment.own_samples(prompts, request.lengths, prefixes)
        requests = []
        for i in own:
            seed = request_seed(self.seed, request.step, i, request.attempt)
            most = limits[i] if limits else None
            new = GenerationRequest(i, prompts[i].token_ids, seed, most)
            requests.append(self._continued(new, prefixes[i] if prefixes else None))

        def on_step(finished: Mapping[int, Completion]) -> None:
            if scorer is None:
                return
            for i, completion in finished.items():
                incomplete = (
                    prefixes
                    and completion.truncated
                    and len(completion.token_ids) < settings.max_response_tokens
                )
                take = scorer.add_unscored if incomplete else scorer.add
                take(Rollout(i, prompts[i], completion))

        rebalancer = self.assignment.rebalancer(
            prompts, settings, request.lengths, prefixes, limits
        )
        done = self.engine.generate(requests, settings, request.version, on_step, rebalancer)
        return [Rollout(i, prompts[i], done[i]) for i in sorted(done)]

    def _continued(
        self, request: GenerationRequest, prefix: RolloutInfo | None
    ) -> GenerationRequest:
        """Return the request of partial rollouts with the prefix that this rank's cache holds."""
        if not self.assignment.partial_tokens:
            return request
        request = replace(request, max_tokens=self.assignment.max_tokens(prefix))
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

        def seed_of(sample_id: int, turn: int) -> int:
            return request_seed(self.seed, request.step, sample_id, request.attempt, turn)

        return run_conversations(
            environments if self.assignment.leads_engine else None,
            {i: request.prompts[i] for i in own},
            self.engine,
            request.settings,
            request.version,
            seed_of,
            scorer,
        )

    def close(self) -> None:
        if self.environments is not None:
            self.environments.runner.close()
        self.rewards.close()


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
