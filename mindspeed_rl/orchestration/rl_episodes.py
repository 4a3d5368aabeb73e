"""Conversations of several turns between the engine and environments.

All engines take their turns together: before each turn every rank learns which samples go on, so
that the ranks of an engine make the same requests and those without any keep in step. Within a turn
an environment answers as soon as its sample has finished, while others are being generated.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.environments import Failed, Observation
from mindspeed_rl.experience.continuations import Continuation, exchange_continuations
from mindspeed_rl.observability.metrics import Mean, MetricSet
from mindspeed_rl.orchestration.rl_balance import my_share
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.orchestration.rl_rollout import Scorer
from mindspeed_rl.rewards import RewardError
from mindspeed_rl.rollout.engine import GenerationRequest, SamplingSettings, request_seed
from mindspeed_rl.types import Completion, Prompt, Rollout

logger = logging.getLogger(__name__)


@dataclass
class Episode:
    """The conversation of one sample: all tokens behind the prompt, and whose they are."""

    sample_id: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turns: int = 0
    reward: float | None = None
    num_told: int = 0

    def tell(self) -> tuple[int, ...]:
        """What was said since the last call: the ranks of its engine have the rest."""
        new = tuple(self.token_ids[self.num_told :])
        self.num_told = len(self.token_ids)
        return new

    def say(self, completion: Completion) -> None:
        """A turn of the model."""
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.loss_mask += [True] * len(completion.token_ids)
        self.turns += 1

    def hear(self, token_ids: Sequence[int]) -> None:
        """An answer of the environment."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)

    def rollout(self, finish_reason: str, version: int, *, trained: bool = True) -> Rollout:
        """The sample; not trained on at all unless ``trained``."""
        mask = tuple(self.loss_mask) if trained else (False,) * len(self.loss_mask)
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        completion = Completion(tokens, logprobs, finish_reason, version, mask)
        return Rollout(self.sample_id, self.prompt, completion)


class Conversations:
    """The samples of one engine, on the rank that leads it.

    Args:
        run: the run.
        prompts: of all samples.
        share: the samples of this engine.
        scorer: gets every sample when its conversation is over.
    """

    def __init__(
        self, run: RLJob, prompts: Sequence[Prompt], share: Collection[int], scorer: Scorer
    ) -> None:
        self._run = run
        self._scorer = scorer
        self._limit = run.config.rollout.rollout_max_response_length
        self._max_turns = run.config.environment.rl_environment_max_turns
        self._episodes = {i: Episode(i, prompts[i]) for i in sorted(share)}
        self._runner = run.environments()
        self._next: list[Continuation] = []
        self._first_error = ""
        self.num_errors = 0

    def begin(self) -> None:
        """Reset all environments."""
        answers = self._runner.reset({i: e.prompt for i, e in self._episodes.items()})
        for i, answer in answers.items():
            if isinstance(answer, Failed):
                self._fail(self._episodes[i], answer)
            else:
                self._go_on(self._episodes[i], answer)

    def advance(self, finished: Mapping[int, Completion]) -> None:
        """The turns that a step of the engine has finished."""
        for i, completion in finished.items():
            self._episodes[i].say(completion)
        answers = self._runner.step({i: done.token_ids for i, done in finished.items()})
        for i, answer in answers.items():
            if isinstance(answer, Failed):
                self._fail(self._episodes[i], answer)
            else:
                self._hear(self._episodes[i], answer, truncated=finished[i].truncated)

    def _hear(self, episode: Episode, observation: Observation, *, truncated: bool) -> None:
        if observation.reward is not None:
            episode.reward = observation.reward
        if truncated or (episode.turns == self._max_turns and not observation.done):
            self._end(episode, "length")
        elif observation.done:
            self._end(episode, "stop")
        else:
            self._go_on(episode, observation)

    def take_next(self) -> list[Continuation]:
        """The samples whose next turn is to be generated."""
        result, self._next = self._next, []
        return result

    def _go_on(self, episode: Episode, observation: Observation) -> None:
        room = self._limit - len(episode.token_ids) - len(observation.token_ids)
        if room <= 0:
            self._end(episode, "length")
            return
        episode.hear(observation.token_ids)
        self._next.append(Continuation(episode.sample_id, room, episode.tell()))

    def _end(self, episode: Episode, reason: str) -> None:
        self._scorer.add(episode.rollout(reason, self._run.version), episode.reward)

    def _fail(self, episode: Episode, failed: Failed) -> None:
        """Never a reward of 0: the sample has none and nothing of it is trained on."""
        self._first_error = self._first_error or failed.trace
        self.num_errors += 1
        logger.warning("sample %d: its environment failed:\n%s", episode.sample_id, failed.trace)
        self._scorer.drop(episode.rollout("stop", self._run.version, trained=False))

    def check_error_rate(self) -> None:
        """Raises `RewardError` when too many environments failed."""
        limit, count = self._run.config.rewards.reward_max_error_rate, len(self._episodes)
        enough = 1 / limit if limit else 0.0  # one failure among few ends no run
        if self.num_errors > limit * max(count, enough):
            raise RewardError(
                f"--rl-environment {self._run.config.environment.rl_environment}: {self.num_errors}"
                f" of {count} conversations failed, above --reward-max-error-rate {limit:g}. First "
                f"failure:\n{self._first_error}"
            )

    def metrics(self) -> MetricSet:
        """How the conversations went."""
        episodes = list(self._episodes.values())
        heard = [len(e.loss_mask) - sum(e.loss_mask) for e in episodes]
        return MetricSet(
            {
                "environment/error_rate": Mean(float(self.num_errors), float(len(episodes))),
                "environment/turns": Mean.of(float(e.turns) for e in episodes),
                "environment/observed_tokens": Mean.of(map(float, heard)),
            }
        )


NO_METRICS = MetricSet(
    {
        "environment/error_rate": Mean(0, 0),
        "environment/turns": Mean(0, 0),
        "environment/observed_tokens": Mean(0, 0),
    }
)


def converse(
    run: RLJob,
    prompts: Sequence[Prompt],
    step: int,
    settings: SamplingSettings,
    attempt: int,
    scorer: Scorer,
) -> MetricSet:
    """Hold the conversations of all ``prompts``; ``scorer`` gets the samples. Collective: world.

    Every turn of every sample has a seed of its own, which no layout changes.

    Raises:
        RewardError: too many environments failed.
    """
    share = set(my_share(run, prompts))
    talks = Conversations(run, prompts, share, scorer) if run.leads_engine else None
    if talks is not None:
        talks.begin()

    def on_step(finished: Mapping[int, Completion]) -> None:
        if talks is not None:
            talks.advance(finished)

    contexts = {i: prompts[i].token_ids for i in share}
    for turn in itertools.count():
        going_on = exchange_continuations(talks.take_next() if talks is not None else [])
        if not going_on:
            break
        mine = [c for c in going_on if c.sample_id in contexts]
        contexts |= {c.sample_id: contexts[c.sample_id] + c.token_ids for c in mine}
        requests = [
            GenerationRequest(
                c.sample_id,
                contexts[c.sample_id],
                request_seed(run.config.train.seed, step, c.sample_id, attempt, turn),
                c.max_tokens,
            )
            for c in mine
        ]
        run.engine.generate(requests, settings, run.version, on_step)
    if talks is None:
        return NO_METRICS
    talks.check_error_rate()
    return talks.metrics()
