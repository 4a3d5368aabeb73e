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
from itertools import takewhile

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.environments import EnvironmentRunner, Failed, Observation
from mindspeed_rl.environments.types import Watch
from mindspeed_rl.generation.scoring import Scorer
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.rewards import RewardError
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.rollout.rebalance import Rebalancer, Visits
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens, SamplingSettings

logger = logging.getLogger(__name__)

ANSWER_WAIT_S = 0.05  # of an engine without requests, before it looks again


@dataclass(frozen=True)
class Environments:
    """The environments of a run, as the rank that leads an engine reaches them.

    Attributes:
        runner: Runs the environments.
        name: Flag that names them, and its value.
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
        token_ids: Tokens of the conversation behind those that are kept.
        kept: Tokens behind the prompt that stay of those that the ranks know; fewer than all where
            the conversation branches.
        watched: Whether somebody reads the turn while it is sampled.
    """

    sample_id: int
    max_tokens: int
    token_ids: tuple[int, ...]
    kept: int
    watched: bool = False


@dataclass(frozen=True, slots=True)
class Continued:
    """What the ranks of an engine learn from its leader between two steps.

    Attributes:
        samples: Samples whose next turn begins.
        num_awaited: Number of conversations whose environments have not answered yet.
    """

    samples: tuple[Continuation, ...]
    num_awaited: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Attributes:
        behind: Number of the turn before it, counted from 1; 0: the prompt.
        observed: Tokens between the two.
        completion: What the model said.
    """

    behind: int
    observed: tuple[int, ...]
    completion: Completion


@dataclass
class Episode:
    """The conversation of one sample: all tokens behind the prompt, and who wrote them.

    Attributes:
        token_ids: Tokens of the present branch, like ``logprobs`` and ``loss_mask``.
        loss_mask: True at tokens of the model.
        turns: All turns in the order of generation, those of other branches as well.
        branches: Number of times that a turn did not follow the one generated before it.
        num_shared: Number of tokens of the branch that the ranks of the engine know already.
    """

    sample_id: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    branches: int = 0
    num_shared: int = 0
    _behind: int = 0
    _observed: tuple[int, ...] = ()

    def length_behind(self, turn: int | None) -> int:
        """Return the number of tokens up to the end of a turn; ``None``: of the last one."""
        if turn is None or turn == len(self.turns):
            return len(self.token_ids)
        return sum(len(t.observed) + len(t.completion.token_ids) for t in self._path(turn))

    def take_new_tokens(self) -> tuple[int, tuple[int, ...]]:
        """Return how many tokens that were shared stay, and those that come behind them."""
        kept, self.num_shared = self.num_shared, len(self.token_ids)
        return kept, tuple(self.token_ids[kept:])

    def append_turn(self, completion: Completion) -> None:
        self.turns.append(Turn(self._behind, self._observed, completion))
        self._behind, self._observed = len(self.turns), ()
        self._append_said(completion)

    def append_observation(self, token_ids: Sequence[int], behind: int | None = None) -> None:
        """Append what the model reads next, behind a turn; ``None``: the last one."""
        if behind is not None and behind != self._behind:
            self._branch(behind)
            self.branches += 1
        self._observed = tuple(token_ids)
        self._append_heard(self._observed)

    def end_behind(self, turn: int | None) -> None:
        """Leave out what comes behind a turn; ``None``: the last one."""
        if turn is not None and turn != self._behind:
            self._branch(turn)

    @property
    def num_dropped(self) -> int:
        """Number of tokens that the model said in other branches than the present one."""
        return sum(len(t.completion.token_ids) for t in self.turns) - sum(self.loss_mask)

    def rollout(self, finish_reason: str, version: int, *, trained: bool = True) -> Rollout:
        """Return the finished sample; with ``trained`` false, none of its tokens is trained on."""
        mask = tuple(self.loss_mask) if trained else (False,) * len(self.loss_mask)
        tokens, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        completion = Completion(tokens, logprobs, finish_reason, version, mask)
        return Rollout(self.sample_id, self.prompt, completion)

    def _branch(self, turn: int) -> None:
        """Make the tokens up to the end of a turn the present branch."""
        known = self.token_ids[: self.num_shared]
        self.token_ids, self.logprobs, self.loss_mask = [], [], []
        for one in self._path(turn):
            self._append_heard(one.observed)
            self._append_said(one.completion)
        pairs = zip(known, self.token_ids, strict=False)
        self.num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._behind = turn

    def _path(self, turn: int) -> list[Turn]:
        """Return the turns that lead to one, from the first."""
        path = []
        while turn:
            path.append(self.turns[turn - 1])
            turn = path[-1].behind
        return path[::-1]

    def _append_said(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.loss_mask += [True] * len(completion.token_ids)

    def _append_heard(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)


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
        self._lengths: list[int] = []  # of the turns that ended here
        self._visitors: dict[int, Completion] = {}  # turns of other engines' conversations
        self._watches: dict[int, Watch] = {}  # who reads a turn while it is sampled
        self._next: list[Continuation] = []
        self._first_error = ""
        self.num_errors = 0
        self._num_ended = 0

    def begin(self) -> None:
        """Ask all environments for their openings."""
        self._awaited = dict.fromkeys(self._episodes, False)
        self._environments.runner.reset({i: e.prompt for i, e in self._episodes.items()})

    def advance(self, finished: Mapping[int, Completion]) -> None:
        """Pass the turns that a step of the engine has finished to their environments.

        Those whose environments are elsewhere wait for the next rebalance point.
        """
        self._lengths += (len(c.token_ids) for c in finished.values())
        own = {i: c for i, c in finished.items() if i in self._episodes}
        self._visitors |= {i: c for i, c in finished.items() if i not in own}
        for i, completion in own.items():
            self._episodes[i].append_turn(completion)
            self._awaited[i] = completion.truncated
            self._watches.pop(i, None)
        self._environments.runner.step({i: c.token_ids for i, c in own.items()})

    def show(self, sampled: Mapping[int, NewTokens]) -> None:
        """Pass tokens of unfinished turns to those who read them, unless these are elsewhere."""
        for i, new in sampled.items():
            if i in self._watches:
                self._watches[i](new.first, new.token_ids)

    @property
    def num_awaited(self) -> int:
        """Number of environments that have not answered, or whose answer was not taken yet."""
        return len(self._awaited)

    def expected(self, sample_id: int, generated: int) -> int:
        """Return the expected tokens of a turn that has ``generated``: the mean of longer ones.

        Half way to the limit where no turn was longer.
        """
        longer = [n for n in self._lengths if n > generated]
        guess = sum(longer) / len(longer) if longer else (generated + self._limit) / 2
        return max(generated + 1, round(guess))

    def take_ended(self) -> int:
        """Return the number of conversations that ended since the last call."""
        ended, self._num_ended = self._num_ended, 0
        return ended

    def leaving(self) -> dict[int, Completion]:
        """Return the turns of other ranks' conversations that ended here since the last call."""
        leaving, self._visitors = self._visitors, {}
        return leaving

    def come_back(self, turns: Mapping[int, Completion]) -> None:
        """Pass turns that ended on other engines to their environments, if these are here."""
        self.advance({i: c for i, c in sorted(turns.items()) if i in self._episodes})

    def take_answered(self, wait_s: float) -> Continued:
        """Return the samples whose environments have answered since the last call.

        Waits up to ``wait_s`` seconds for the first, or for all where they answer in step.
        """
        runner, in_step = self._environments.runner, self._environments.in_step
        answers = runner.answers(wait_s)
        while in_step and len(answers) < len(self._awaited):
            answers |= runner.answers(ANSWER_WAIT_S)
        for i, answer in sorted(answers.items()):
            cut = self._awaited.pop(i)
            if isinstance(answer, Failed):
                self._fail(self._episodes[i], answer)
            elif self._episodes[i].turns:
                self._observe(self._episodes[i], answer, cut=cut)
            else:
                self._continue(self._episodes[i], answer)
        samples, self._next = tuple(self._next), []
        return Continued(samples, len(self._awaited))

    def _observe(self, episode: Episode, observation: Observation, *, cut: bool) -> None:
        if observation.reward is not None:
            episode.reward = observation.reward
        if observation.done:
            episode.end_behind(observation.behind)
            self._end(episode, "length" if cut or observation.cut else "stop")
        elif len(episode.turns) == self._environments.max_turns:
            self._end(episode, "length")
        else:
            self._continue(episode, observation)

    def _continue(self, episode: Episode, observation: Observation) -> None:
        heard, behind = observation.token_ids, observation.behind
        room = self._limit - episode.length_behind(behind) - len(heard)
        if room <= 0:
            self._end(episode, "length")
            return
        episode.append_observation(heard, behind)
        kept, new = episode.take_new_tokens()
        most = room if observation.max_tokens is None else min(room, observation.max_tokens)
        watched = observation.watch is not None
        if observation.watch is not None:
            self._watches[episode.sample_id] = observation.watch
        self._next.append(Continuation(episode.sample_id, most, new, kept, watched))

    def _end(self, episode: Episode, reason: str) -> None:
        self._num_ended += 1
        self._scorer.add(episode.rollout(reason, self._version), episode.reward)

    def _fail(self, episode: Episode, failed: Failed) -> None:
        """Finish a sample without a reward (not even 0), and train on none of its tokens."""
        self._first_error = self._first_error or failed.trace
        self.num_errors += 1
        self._num_ended += 1
        logger.warning("sample %d: its environment failed:\n%s", episode.sample_id, failed.trace)
        self._scorer.add_unscored(episode.rollout("stop", self._version, trained=False))

    def check_error_rate(self) -> None:
        """Raise `RewardError` when too many environments failed."""
        limit, count = self._environments.max_error_rate, len(self._episodes)
        enough = 1 / limit if limit else 0.0  # one failure among few samples must not end the run
        if self.num_errors > limit * max(count, enough):
            raise RewardError(
                f"{self._environments.name}: {self.num_errors} of {count} conversations failed, "
                f"above --reward-max-error-rate {limit:g}. First failure:\n{self._first_error}"
            )

    def metrics(self) -> MetricSet:
        return conversation_metrics(self._episodes.values(), self.num_errors)


def conversation_metrics(episodes: Collection[Episode], num_errors: int) -> MetricSet:
    """Return the metrics of conversations; they have the same names without any conversation."""
    observed = [len(e.loss_mask) - sum(e.loss_mask) for e in episodes]
    return MetricSet(
        {
            "environment/error_rate": Mean(float(num_errors), float(len(episodes))),
            "environment/turns": Mean.of(float(len(e.turns)) for e in episodes),
            "environment/observed_tokens": Mean.of(map(float, observed)),
            "environment/branches": Mean.of(float(e.branches) for e in episodes),
            "environment/dropped_tokens": Mean.of(float(e.num_dropped) for e in episodes),
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
        self._openings = {i: len(prompt.token_ids) for i, prompt in prompts.items()}
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

    def show(self, sampled: Mapping[int, NewTokens]) -> None:
        """Pass tokens of unfinished turns on where the conversations are; see `Arrivals`."""
        if self._conversations is not None:
            self._conversations.show(sampled)

    def _request(self, continuation: Continuation) -> GenerationRequest:
        i = continuation.sample_id
        kept = self._contexts[i][: self._openings[i] + continuation.kept]
        context = self._contexts[i] = kept + continuation.token_ids
        seed = self._seed_of(i, self._turns[i])
        self._turns[i] += 1
        return GenerationRequest(
            i,
            context,
            seed,
            continuation.max_tokens,
            opening=self._openings[i],
            watched=continuation.watched,
        )


def run_conversations(
    environments: Environments | None,
    prompts: Mapping[int, Prompt],
    engine: InferenceEngine,
    settings: SamplingSettings,
    version: int,
    seed_of: Callable[[int, int], int],
    scorer: Scorer,
    rebalancer_of: Callable[[Visits | None], Rebalancer | None] = lambda _: None,
    count: Callable[[int], None] = lambda _: None,
) -> MetricSet:
    """Run the conversations of an engine; ``scorer`` gets the samples.

    Collective: the ranks of the engine; the world where turns may move between engines.

    Args:
        environments: Environments; ``None`` on ranks that do not lead their engine.
        prompts: Prompts of the samples of this engine, by sample id.
        engine: Engine of this rank.
        settings: Sampling settings; their limit is that of a whole conversation.
        version: Version of the weights.
        seed_of: (sample id, turn) -> seed, so that no layout changes a turn.
        scorer: See :class:`Conversations`.
        rebalancer_of: Makes what moves turns between engines, for the conversations of this rank.
        count: Called after every step with the number of conversations that ended in it.

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
            count(conversations.take_ended())

    turns = Turns(conversations, prompts, engine, seed_of)
    rebalancer = rebalancer_of(conversations)
    first = turns.take(wait=False)
    engine.generate(first, settings, version, on_step, rebalancer, arrivals=turns)
    if conversations is None:
        return conversation_metrics((), 0)
    conversations.check_error_rate()
    return conversations.metrics()
