"""Drafts of the next tokens of a response, from texts that begin like it: when, how long, and what.

A draft changes no token: the engine computes the tokens of a draft in one step and keeps those that
it would have sampled anyway. It can only cost the time of the tokens that it does not keep.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_rl.rollout.draft_costs import DraftController, DraftPlan, StepTime, saved_steps
from mindspeed_rl.rollout.suffixes import SuffixIndex

# Tokens of earlier responses that a search may add to the index, so that no step waits for all.
_INDEXED_PER_SEARCH = 256


def draft_length(acceptance: float, plan: DraftPlan, most: int) -> int:
    """Return the length with the most tokens per cost; 0 where no draft pays. Pure.

    A draft of k tokens gives 1 + a + ... + a^k tokens in the mean. Each adds less than the one
    before it at the same cost, so the first that lowers the rate ends the search.

    Args:
        acceptance: Probability a that a drafted token is kept where all before it were, in [0, 1].
        plan: Costs of a token and of a search, in steps of a response.
        most: Longest draft.
    """
    tokens = power = 1.0
    best, before = 0, 0.0
    for length in range(1, most + 1):
        power *= acceptance
        tokens += power
        rate = tokens / (1 + plan.search_cost + plan.token_cost * length)
        if rate <= before:
            break
        best, before = length, rate
    return best if before > 1.0 else 0


@dataclass(slots=True)
class DraftLedger:
    """The drafts of a call of an engine, in steps and tokens.

    Attributes:
        steps: Steps of all responses, each counted for itself.
        drafted: Tokens of all drafts.
        kept: Tokens of them that were sampled.
        drafts: Drafts of at least one token.
        search_seconds: Time in which they were sought.
    """

    steps: int = 0
    drafted: int = 0
    kept: int = 0
    drafts: int = 0
    search_seconds: float = 0.0


class _Texts:
    """The texts behind one prompt: an index, and earlier responses that it does not have yet."""

    def __init__(self, prompt: tuple[int, ...], earlier: Sequence[Sequence[int]]) -> None:
        self.index = SuffixIndex()
        self._start = prompt[-self.index.longest :]
        self.index.add(prompt)
        self._missing = deque(earlier)
        self._text, self._done = 0, 0

    def begin(self) -> int:
        """Begin a text behind the prompt and return its number."""
        return self.index.add(self._start)

    def index_some(self, count: int) -> None:
        """Add up to ``count`` tokens of earlier responses to the index, the oldest first."""
        while self._missing and count > 0:
            response = self._missing[0]
            if not self._done:
                self._text = self.begin()
            some = response[self._done : self._done + count]
            self.index.extend(self._text, some)
            count -= len(some)
            self._done += len(some)
            if self._done == len(response):
                self._missing.popleft()
                self._done = 0


@dataclass(slots=True)
class _Response:
    """An unfinished response: its text, how much of it is in an index, how its drafts have fared.

    Attributes:
        sampled: Tokens of it that this engine sampled.
        starts: Whether the next step reads its prompt.
    """

    prompt: tuple[int, ...]
    texts: _Texts
    number: int
    kept: float
    tried: float
    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    draft: list[int] = field(default_factory=list)
    idle: int = 0
    sampled: int = 0
    starts: bool = True

    def note(self, kept: int, memory: float) -> None:
        # A draft ends with its first wrong token: those behind it were not tried.
        tried = min(kept + 1, len(self.draft))
        self.kept = memory * self.kept + kept
        self.tried = memory * self.tried + tried

    @property
    def acceptance(self) -> float:
        return self.kept / self.tried

    def continuation(self, length: int) -> list[int]:
        index = self.texts.index
        index.extend(self.number, self.tokens[self.indexed :])
        self.indexed = len(self.tokens)
        self.texts.index_some(_INDEXED_PER_SEARCH)
        return index.continuation(self.number, length)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What a step of the engine sampled for one response.

    Attributes:
        name: Name of the response.
        tokens: Its new tokens; empty where only a part of the prompt was read.
        room: Most tokens that its next draft may have.
    """

    name: str
    tokens: Sequence[int]
    room: int


class Drafter:
    """Drafts for the responses of one call of an engine. Local; ranks of an engine draft alike.

    Args:
        controller: Decides when drafts are sought; it outlives the call.
        clock: Seconds.

    Attributes:
        ledger: Numbers of the drafts so far.
    """

    def __init__(
        self, controller: DraftController, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.ledger = DraftLedger()
        self._controller = controller
        self._clock = clock
        self._texts: dict[tuple[int, ...], _Texts] = {}
        self._responses: dict[str, _Response] = {}
        self._last: StepTime | None = None
        self._num_steps = 0

    def open(
        self,
        name: str,
        prompt: tuple[int, ...],
        prefix: Sequence[int],
        earlier: Sequence[Sequence[int]],
    ) -> None:
        """Begin to draft for a response; what is open for the same prompt are its siblings.

        A response of which this is the next turn, or that was elsewhere in between, goes on.

        Args:
            name: Name of the response in :meth:`step`.
            prompt: Tokens of the prompt.
            prefix: Tokens behind the prompt that there are already: sampled ones, and in a
                conversation those of the environment.
            earlier: Earlier responses to the prompt, the newest last; read with the first sibling.
        """
        known = self._responses.get(name)
        if known is not None and known.prompt == prompt:
            new = len(known.tokens)
            if known.tokens == list(prefix[:new]):
                known.tokens += prefix[new:]
                known.draft, known.starts = [], True
                return
        texts = self._texts.get(prompt)
        if texts is None:
            texts = self._texts[prompt] = _Texts(prompt, earlier)
        prior = self._controller.rule.prior
        response = _Response(prompt, texts, texts.begin(), prior / 2, prior, list(prefix))
        self._responses[name] = response

    def step(self, rows: Sequence[SampledRow]) -> list[list[int]]:
        """Note the tokens that a step sampled, and return the drafts for the next one.

        Args:
            rows: Responses in the step; one that was not opened has no drafts.
        """
        start = self._clock()
        seeks = False
        found = [self._responses.get(row.name) if row.tokens else None for row in rows]
        prompts = any(response is None or response.starts for response in found)
        verified, kept, searches = 0, 0, 0
        for row, response in zip(rows, found, strict=True):
            if response is not None:
                verified += len(response.draft)
                kept += self._note(response, row.tokens)
        drafts: list[list[int]] = [[] for _ in rows]
        if any(found):
            self._num_steps += 1
            seeks = self._controller.seeks()
        if seeks:
            for i, (row, response) in enumerate(zip(rows, found, strict=True)):
                length = 0 if response is None else self._length(response, row.room)
                if response is not None and length > 0:
                    searches += 1
                    drafts[i] = response.draft = response.continuation(length)
        ledger = self.ledger
        ledger.kept += kept
        ledger.drafted += sum(map(len, drafts))
        ledger.drafts += sum(map(bool, drafts))
        seconds = self._clock() - start if seeks else 0.0
        ledger.search_seconds += seconds
        self._last = StepTime(len(rows), verified, kept, searches, seconds, 0.0, prompts)
        return [list(draft) for draft in drafts]

    def end_step(self, seconds: float) -> StepTime | None:
        """Return the last step, which took so long as a whole; ``None`` where nothing was sampled.

        Args:
            seconds: Seconds of the step, those of :meth:`step` included.
        """
        last, self._last = self._last, None
        return None if last is None else replace(last, seconds=seconds)

    def saved_steps(self, capacity: int) -> int:
        """Return how many steps fewer the engine made than without drafts.

        Args:
            capacity: Responses that run at once.
        """
        counts = [response.sampled for response in self._responses.values()]
        return saved_steps(counts, self._num_steps, capacity)

    def _note(self, response: _Response, tokens: Sequence[int]) -> int:
        """Add the tokens of a step, and return how many of them were drafted."""
        self.ledger.steps += 1
        response.starts = False
        response.sampled += len(tokens)
        kept = 0
        if response.draft:
            kept = len(tokens) - 1
            response.note(kept, self._controller.rule.memory)
        response.draft = []
        response.tokens += tokens
        return kept

    def _length(self, response: _Response, room: int) -> int:
        rule, plan = self._controller.rule, self._controller.plan
        length = draft_length(response.acceptance, plan, rule.most)
        if not length:
            response.idle += 1
            length = int(response.idle % rule.probe_every == 0)
        return min(length, room)
