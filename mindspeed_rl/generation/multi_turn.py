"""Conversations of several turns between the engine and environments.

Every conversation goes at its own pace: when its environment has answered, its next turn joins the
turns of others that its engine generates. The rank that leads an engine has the environments and
tells the other ranks of the engine, between two steps, which samples continue with which tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.environments import EnvironmentRunner, Failed, Observation
from mindspeed_rl.generation.scoring import Scorer
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rewards import RewardError
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings

logger = logging.getLogger(__name__)

ANSWER_WAIT_S = 0.05  # of an engine without requests, before it looks again


@dataclass(frozen=True)
class Environments:
    """The environments of a run, as the rank that leads an engine reaches them.

    Attributes:
        runner: Runs the environments.
        name: Value of ``--rl-environment``.
        max_turns: Most turns of the model in one conversation.
        max_error_rate: Largest part of conversations whose environment may fail.
        in_step: Whether the engine waits for every answer, so that the turns which are generated
            together do not depend on the times of answers.
    """

    runner: EnvironmentRunner
    name: str
    max_turns: int
    max_error_rate: float
    in_step: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sample whose next turn is to be generated.

    Attributes:
        sample_id: Position of the sample in the step.
        max_tokens: Largest number of tokens of the turn.
        token_ids: Tokens of the conversation since the beginning of its last turn.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continued:
    """What the ranks of an engine learn from its leader between two steps.

    Attributes:
        samples: Samples whose next turn begins.
        num_awaited: Number of conversations whose environments have not answered yet.
    """

    samples: tuple[Continuation, ...]
    num_awaited: int


@dataclass
class Episode:
    """The conversation of one sample: all tokens behind the prompt, and who wrote them.

    Attributes:
        loss_mask: True at tokens of the model.
        num_shared: Number of tokens that the ranks of the engine know already.
    """

    sample_id: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turns: int = 0
    reward: float | None = None
    num_shared: int = 0

    def take_new_tokens(self) -> tuple[int, ...]:
        """Return the tokens that were written since the last call."""
        new = tuple(self.token_ids[self.num_shared :])
        self.num_shared = len(self.token_ids)
        return new

    def append_turn(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.loss_mask += [True] * len(completion.token_ids)
        self.turns += 1

    def append_observation(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)

    def rollout(self, finish_reason: str, version: int, *, trained: bool = True) -> Rollout:
        """Return the finished sample; with ``trained`` false, none of its tokens is trained on."""
        mask = tuple(self.loss_mask) if trained else (False,) * len(self.loss_mask)
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        completion = Completion(tokens, logprobs, finish_reason, version, mask)
        return Rollout(self.sample_id, self.prompt, completion)


class Conversations:
    """The conversations of one engine, on the rank that leads it.

    Args:
        environments: Environments of the run.
        prompts: Prompts of the samples of this engine, by sample id.
        limit: Most tokens of a whole response.
        version: Version of the weights that sample.
        scorer: Gets every sample when its conversation is over.
    """

    def __init__(
        self,
        environments: Environments,
        prompts: Mapping[int, Prompt],
        limit: int,
        version: int,
        scorer: Scorer,
    ) -> None:
        self._environments = environments
        self._scorer = scorer
        self._limit = limit
        self._version = version
        self._episodes = {i: Episode(i, prompts[i]) for i in sorted(prompts)}
        self._awaited: dict[int, bool] = {}  # asked environments -> whether the turn was cut
        self._next: list[Continuation] = []
        self._first_error = ""
        self.num_errors = 0

    def begin(self) -> None:
        """Ask all environments for their openings."""
        self._awaited = dict.fromkeys(self._episodes, False)
        self._environments.runner.reset({i: e.prompt for i, e in self._episodes.items()})

    def advance(self, finished: Mapping[int, Completion]) -> None:
        """Pass the turns that a step of the engine has finished to their environments."""
        for i, completion in finished.items():
            self._episodes[i].append_turn(completion)
            self._awaited[i] = completion.truncated
        self._environments.runner.step({i: c.token_ids for i, c in finished.items()})

    def take_answered(self, wait_s: float) -> Continued:
        """Return the samples whose environments have answered since the last call.

        Waits up to ``wait_s`` seconds for the first, or for all where they answer in step.
        """
        runner, in_step = self._environments.runner, self._environments.in_step
        answers = runner.answers(wait_s)
        while in_step and len(answers) < len(self._awaited):
            answers |= runner.answers(ANSWER_WAIT_S)
        for i, answer in sorted(answers.items()):
            truncated = self._awaited.pop(i)
            if isinstance(answer, Failed):
                self._fail(self._episodes[i], answer)
            elif self._episodes[i].turns:
                self._observe(self._episodes[i], answer, truncated=truncated)
            else:
                self._continue(self._episodes[i], answer)
        samples, self._next = tuple(self._next), []
        return Continued(samples, len(self._awaited))

    def _observe(self, episode: Episode, observation: Observation, *, truncated: bool) -> None:
        if observation.reward is not None:
            episode.reward = observation.reward
        out_of_turns = episode.turns == self._environments.max_turns and not observation.done
        if truncated or out_of_turns:
            self._end(episode, "length")
        elif observation.done:
            self._end(episode, "stop")
        else:
            self._continue(episode, observation)

    def _continue(self, episode: Episode, observation: Observation) -> None:
        room = self._limit - len(episode.token_ids) - len(observation.token_ids)
        if room <= 0:
            self._end(episode, "length")
            return
        episode.append_observation(observation.token_ids)
        self._next.append(Continuation(episode.sample_id, room, episode.take_new_tokens()))

    def _end(self, episode: Episode, reason: str) -> None:
        self._scorer.add(episode.rollout(reason, self._version), episode.reward)

    def _fail(self, episode: Episode, failed: Failed) -> None:
        """Finish a sample without a reward (not even 0), and train on none of its tokens."""
        self._first_error = self._first_error or failed.trace
        self.num_errors += 1
        logger.warning("sample %d: its environment failed:\n%s", episode.sample_id, failed.trace)
        self._scorer.add_unscored(episode.rollout("stop", self._version, trained=False))

    def check_error_rate(self) -> None:
        """Raise `RewardError` when too many environments failed."""
        limit, count = self._environments.max_error_rate, len(self._episodes)
        enough = 1 / limit if limit else 0.0  # one failure among few samples must not end the run
        if self.num_errors > limit * max(count, enough):
            raise RewardError(
                f"--rl-environment {self._environments.name}: {self.num_errors} of {count} "
                f"conversations failed, above --reward-max-error-rate {limit:g}. First "
                f"failure:\n{self._first_error}"
            )

    def metrics(self) -> MetricSet:
        return conversation_metrics(self._episodes.values(), self.num_errors)


def conversation_metrics(episodes: Collection[Episode], num_errors: int) -> MetricSet:
    """Return the metrics of conversations; they have the same names without any conversation."""
    observed = [len(e.loss_mask) - sum(e.loss_mask) for e in episodes]
    return MetricSet(
        {
            "environment/error_rate": Mean(float(num_errors), float(len(episodes))),
            "environment/turns": Mean.of(float(e.turns) for e in episodes),
            "environment/observed_tokens": Mean.of(map(float, observed)),
        }
    )


class Turns:
    """The turns of an engine's conversations, as each of its ranks generates them.

    Args:
        conversations: The conversations on the rank that leads the engine; ``None`` elsewhere.
        prompts: Prompts of the samples of this engine, by sample id.
        engine: Engine of this rank.
        seed_of: (sample id, turn) -> seed, so that no layout changes a turn.

    Attributes:
        num_awaited: Number of conversations whose next turn may come.
    """

    def __init__(
        self,
        conversations: Conversations | None,
        prompts: Mapping[int, Prompt],
        engine: InferenceEngine,
        seed_of: Callable[[int, int], int],
    ) -> None:
        self._conversations = conversations
        self._engine = engine
        self._seed_of = seed_of
        self._contexts = {i: prompt.token_ids for i, prompt in prompts.items()}
        self._turns: Counter[int] = Counter()
        self.num_awaited = len(prompts)

    def take(self, *, wait: bool) -> list[GenerationRequest]:
        """Return the turns that begin. Collective: the ranks that share the conversations."""
        mine = None
        if self._conversations is not None:
            mine = self._conversations.take_answered(ANSWER_WAIT_S if wait else 0.0)
        continued = self._engine.from_leader(mine)
        self.num_awaited = continued.num_awaited
        return [self._request(c) for c in continued.samples]

    def _request(self, continuation: Continuation) -> GenerationRequest:
        i = continuation.sample_id
        context = self._contexts[i] = self._contexts[i] + continuation.token_ids
        seed = self._seed_of(i, self._turns[i])
        self._turns[i] += 1
        return GenerationRequest(i, context, seed, continuation.max_tokens)


def run_conversations(
    environments: Environments | None,
    prompts: Mapping[int, Prompt],
    engine: InferenceEngine,
    settings: SamplingSettings,
    version: int,
    seed_of: Callable[[int, int], int],
    scorer: Scorer,
) -> MetricSet:
    """Run the conversations of an engine; ``scorer`` gets the samples.

    Collective: the ranks of the engine.

    Args:
        environments: Environments; ``None`` on ranks that do not lead their engine.
        prompts: Prompts of the samples of this engine, by sample id.
        engine: Engine of this rank.
        settings: Sampling settings; their limit is that of a whole conversation.
        version: Version of the weights.
        seed_of: (sample id, turn) -> seed, so that no layout changes a turn.
        scorer: See :class:`Conversations`.

    Raises:
        RewardError: too many environments failed.
    """
    conversations = None
    if environments is not None:
        limit = settings.max_response_tokens
        conversations = Conversations(environments, prompts, limit, version, scorer)
        conversations.begin()

    def on_step(finished: Mapping[int, Completion]) -> None:
        if conversations is not None:
            conversations.advance(finished)

    turns = Turns(conversations, prompts, engine, seed_of)
    engine.generate(turns.take(wait=False), settings, version, on_step, arrivals=turns)
    if conversations is None:
        return conversation_metrics((), 0)
    conversations.check_error_rate()
    return conversations.metrics()
