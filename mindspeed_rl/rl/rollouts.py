"""Generates the rollouts of an RL step, in passes until there are enough groups to train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.generation.assignment import observe_lengths
from mindspeed_rl.generation.evaluate import SharedEvaluation
from mindspeed_rl.generation.length_caps import LengthCaps, length_caps
from mindspeed_rl.generation.rollout_worker import (
    PassRequest,
    PhaseContext,
    RolloutWorker,
    TailWork,
)
from mindspeed_rl.metrics.metric_set import MetricSet
from mindspeed_rl.metrics.telemetry import named_phase
from mindspeed_rl.rl.advantages import length_penalty
from mindspeed_rl.rl.components import Components, PromptData, RunState
from mindspeed_rl.rl.dynamic_sampling import Group, fill_step
from mindspeed_rl.rl.partial_rollouts import complete_groups
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey
from mindspeed_rl.samples.shown_tokens import shown_samples
from mindspeed_rl.samples.store import SampleStore


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The rollouts of a step on every rank, and the metrics of this rank about them.

    Attributes:
        samples: Samples to train on, siblings of a prompt together, numbered by their place.
        generated: All samples of this step, for the report; ``samples`` where earlier steps
            sampled everything that is trained on.
        metrics: Metrics of sampling and of the rewards.
        greedy_rewards: Reward of the greedy response to each prompt with its length penalty, NaN
            where it abstained; ``None`` unless the advantage estimator needs them.
    """

    samples: list[RolloutInfo]
    generated: list[RolloutInfo]
    metrics: MetricSet
    greedy_rewards: list[float] | None = None


@dataclass
class _StepSampling:
    """The passes of one step, each with its own seeds and sample keys, and their merged metrics.

    Attributes:
        worker: Worker that generates and scores the samples.
        store: Store that keeps their tokens.
        data: Prompts of the run.
        config: Flags of the run.
        group_size: Number of samples of a prompt.
        phase: Names the parts of a pass for timer and watchdog.
        state: State of the run.
        caps: Caps of responses by earlier ones; ``None``: there are none.
        tail: Work for ranks whose engine is done before others; ``None``: there is none.
        shared: Evaluation that is generated with the first pass; ``None``: there is none.
        num_generated: Number of samples generated so far.
        metrics: Metrics of the passes so far.
    """

    worker: RolloutWorker
    store: SampleStore
    data: PromptData
    config: RLRunConfig
    group_size: int
    phase: PhaseContext
    state: RunState
    caps: LengthCaps | None = None
    tail: TailWork | None = None
    shared: SharedEvaluation | None = None
    num_generated: int = 0
    metrics: MetricSet = field(default_factory=MetricSet)

    def one_pass(
        self, prompts: Sequence[Prompt], attempt: int, prefixes: Sequence[RolloutInfo | None] = ()
    ) -> list[RolloutInfo]:
        """Generate a response to each prompt, or continue its prefix. Collective: the world."""
        request = PassRequest(
            prompts,
            self.state.step,
            self.worker.settings(self.config.rl.rl_default_temperature),
            self.state.version,
            attempt=attempt,
            key=SampleKey(self.state.step, self.num_generated),
            lengths=self.state.lengths,
            prefixes=prefixes,
            limits=self.limits(prompts),
        )
        beside = self.shared.take() if self.shared else ()
        found = self.worker.run(request, self.phase, tail=self.tail, beside=beside)
        if self.shared:
            self.shared.note(found)
        self.store.keep(found.rollouts, found.samples)
        self.num_generated += len(prompts)
        self.metrics = self.metrics.merge(found.metrics)
        return found.samples

    def limits(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """Return the cap of the response to each prompt; empty without caps."""
        return self.caps.of(prompts, self.state.lengths) if self.caps else ()

    def new_groups(self, num_groups: int, attempt: int) -> list[Group]:
        """Generate complete groups for the next prompts of the data set."""
        data, size = self.data, self.group_size
        prompts = [data.train[i] for i in self.state.sampler.next(num_groups)]
        samples = self.one_pass([p for p in prompts for _ in range(size)], attempt)
        return [samples[i : i + size] for i in range(0, len(samples), size)]

    def grown_groups(self, needed: int, in_flight: int) -> list[Group]:
        """Return complete groups of partial rollouts; the other groups wait for the next step."""
        state = self.state
        done = complete_groups(
            state.partial_groups,
            needed,
            in_flight,
            group_size=self.group_size,
            limit=self.worker.assignment.limit,
            next_prompts=state.sampler.next,
            prompts=self.data.train,
            # Each pass of a step needs seeds of its own.
            run_pass=lambda p, prefixes: self.one_pass(p, self.num_generated, prefixes),
        )
        state.partial_groups = done.partial
        self.metrics = self.metrics.merge(done.metrics(state.version))
        return done.complete

    def greedy_rewards(self, groups: Sequence[Group]) -> list[float]:
        """Return the reward of a greedy response to the prompt of each group, penalised."""
        prompts = [self.data.train[group[0].prompt_index] for group in groups]
        settings = self.worker.settings(0.0)
        limits = self.limits(prompts)  # those of the samples, to which they are compared
        request = PassRequest(prompts, self.state.step, settings, self.state.version, limits=limits)
        found = self.worker.run(request, self.phase)
        self.metrics = self.metrics.merge(found.metrics)
        # Penalised as samples are; otherwise a long greedy response is too high a baseline.
        return [s.reward + length_penalty(self.config, s) for s in found.samples]


def generate_rollouts(
    run: Components, state: RunState, shared: SharedEvaluation | None = None
) -> RolloutBatch:
    """Sample and score the rollouts of a step. Collective: the world; within ROLLOUT.

    The responses of ``shared`` are generated with them, and counted in the metrics of steps alone.
    """
    limit_s = shared.limit_s if shared else None
    sampling = _StepSampling(
        worker=run.rollouts,
        store=run.samples,
        data=run.data,
        config=run.config,
        group_size=run.plan.batch.group_size,
        phase=partial(named_phase, run.telemetry.timer, run.job.watchdog, limit_s=limit_s),
        state=state,
        caps=length_caps(run.config),
        tail=run.tail,
        shared=shared,
    )
    carried = [s for group in (*state.carried_groups, *state.partial_groups) for s in group]
    run.samples.begin_step(state.step, carried)
    num_groups, flags = run.plan.batch.prompts, run.config.sampling
    is_partial = run.config.balance.partial_rollout_tokens > 0

    def draw(needed: int, in_flight: int, attempt: int) -> list[Group]:
        if is_partial:
            return sampling.grown_groups(needed, in_flight)
        return sampling.new_groups(in_flight, attempt)

    if flags.grpo_filter_groups_with_same_reward:
        filled = fill_step(
            num_groups,
            state.carried_groups,
            draw,
            max_resample=flags.rl_max_resample,
            exhausted=flags.rl_resample_exhausted,
            factor=flags.rl_resample_factor,
        )
        groups, generated, state.carried_groups = filled.groups, filled.generated, filled.carried
        sampling.metrics = sampling.metrics.merge(filled.metrics)
    elif is_partial:
        missing = max(0, num_groups - len(state.carried_groups))
        in_flight = math.ceil(missing * flags.rl_resample_factor)
        generated = draw(missing, in_flight, 0) if missing else []
        complete = [*state.carried_groups, *generated]  # those of earlier steps come first
        groups, state.carried_groups = complete[:num_groups], complete[num_groups:]
    else:
        groups = generated = draw(num_groups, num_groups, 0)
    greedy = None
    if run.config.advantages.estimator.needs_greedy:
        greedy = sampling.greedy_rewards(groups)
    if sampling.caps is not None:
        found = sampling.caps.metrics(generated, state.lengths)
        sampling.metrics = sampling.metrics.merge(found)
    everything, trained = _numbered(generated), _numbered(groups)
    observe_lengths(state.lengths, everything)
    rollouts = RolloutBatch(trained, everything or trained, sampling.metrics, greedy)
    shown = shown_samples(rollouts.generated, run.config.logging.log_rollouts)
    run.telemetry.tokens.begin(shown)
    return rollouts


def _numbered(groups: Sequence[Group]) -> list[RolloutInfo]:
    """Return the samples of all groups, numbered by their place in the step."""
    samples = [s for group in groups for s in group]
    return [s if s.sample_id == i else replace(s, sample_id=i) for i, s in enumerate(samples)]
