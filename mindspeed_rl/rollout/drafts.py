"""Drafts of the next tokens of a response, from texts that begin like it: when, how long, and what.

A draft changes no token: the engine computes the tokens of a draft in one step and keeps those that
it would have sampled anyway. It can only cost the time of the tokens that it does not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_rl.rollout.suffixes import SuffixIndex


@dataclass(frozen=True, slots=True)
class DraftRule:
    """The cost model of drafts: a step costs 1 per response in it, and each drafted token a part.

    Attributes:
        most: Longest draft, in tokens.
        token_cost: Cost of a drafted token beside that of a step, for one response.
        allowed_loss: Largest share of the cost of all steps by which drafts may be in deficit.
        prior: Drafted tokens that a new response is assumed to have had, half of them kept.
        memory: Weight of what is known in what is known after the next draft.
        probe_every: Steps between drafts of one token for a response whose drafts do not pay.
    """

    most: int = 8
    token_cost: float = 0.05
    allowed_loss: float = 0.03
    prior: float = 2.0
    memory: float = 0.9
    probe_every: int = 32


def draft_length(acceptance: float, rule: DraftRule) -> int:
    """Return the length with the most tokens per cost; 0 where no draft pays. Pure.

    A draft of k tokens gives 1 + a + ... + a^k tokens in the mean. Each adds less than the one
    before it at the same cost, so the first that does not pay ends the search.

    Args:
        acceptance: Probability a that a drafted token is kept where all before it were, in [0, 1].
        rule: Cost model.
    """
    tokens = power = best = 1.0
    for length in range(1, rule.most + 1):
        power *= acceptance
        tokens += power
        rate = tokens / (1 + rule.token_cost * length)
        if rate <= best:
            return length - 1
        best = rate
    return rule.most


@dataclass(slots=True)
class DraftLedger:
    """What the drafts of an engine cost and saved, in steps of one response.

    Attributes:
        rule: Cost model.
        steps: Steps of all responses, each counted for itself.
        drafted: Tokens of all drafts.
        kept: Tokens of them that were sampled.
        drafts: Drafts of at least one token.
    """

    rule: DraftRule
    steps: int = 0
    drafted: int = 0
    kept: int = 0
    drafts: int = 0

    @property
    def affordable(self) -> int:
        """Tokens that may be drafted so that, if none is kept, the loss stays in its bounds."""
        credit = self.rule.allowed_loss * self.steps + self.kept
        return max(0, int(credit / self.rule.token_cost - self.drafted))


@dataclass(slots=True)
class _Response:
    """An unfinished response: its text in an index, and how its drafts have fared."""

    index: SuffixIndex
    number: int
    kept: float
    tried: float
    draft: list[int] = field(default_factory=list)
    idle: int = 0

    def note(self, kept: int, memory: float) -> None:
        # A draft ends with its first wrong token: those behind it were not tried.
        tried = min(kept + 1, len(self.draft))
        self.kept = memory * self.kept + kept
        self.tried = memory * self.tried + tried

    @property
    def acceptance(self) -> float:
        return self.kept / self.tried


class Drafter:
    """Drafts for the responses of one call of an engine. Local; ranks of an engine draft alike.

    Args:
        rule: Cost model.

    Attributes:
        ledger: Costs and savings of the drafts so far.
    """

    def __init__(self, rule: DraftRule) -> None:
        self.ledger = DraftLedger(rule)
        self._indexes: dict[tuple[int, ...], SuffixIndex] = {}
        self._responses: dict[str, _Response] = {}

    def open(
        self,
        name: str,
        prompt: tuple[int, ...],
        prefix: Sequence[int],
        earlier: Sequence[Sequence[int]],
    ) -> None:
        """Begin to draft for a response; what is open for the same prompt are its siblings.

        Args:
            name: Name of the response in :meth:`step`.
            prompt: Tokens of the prompt.
            prefix: Tokens that the response already has.
            earlier: Earlier responses to the prompt, the newest last; read with the first sibling.
        """
        index = self._indexes.get(prompt)
        if index is None:
            index = self._indexes[prompt] = SuffixIndex()
            index.add(prompt)
            for response in earlier:
                index.extend(index.add(prompt[-index.longest :]), response)
        number = index.add(prompt[-index.longest :])
        index.extend(number, prefix)
        prior = self.ledger.rule.prior
        self._responses[name] = _Response(index, number, prior / 2, prior)

    def step(self, name: str, sampled: Sequence[int], room: int) -> list[int]:
        """Note the tokens that a step sampled, and return the draft for the next step.

        Args:
            name: Name of the response; one that was not opened has no drafts.
            sampled: At least one token.
            room: Most tokens that the draft may have.
        """
        response, rule, ledger = self._responses.get(name), self.ledger.rule, self.ledger
        if response is None:
            return []
        ledger.steps += 1
        if response.draft:
            kept = len(sampled) - 1
            ledger.kept += kept
            response.note(kept, rule.memory)
        response.index.extend(response.number, sampled)
        length = draft_length(response.acceptance, rule)
        if not length:
            response.idle += 1
            length = int(response.idle % rule.probe_every == 0)
        length = min(length, room, ledger.affordable)
        response.draft = response.index.continuation(response.number, length) if length > 0 else []
        ledger.drafted += len(response.draft)
        ledger.drafts += bool(response.draft)
        return list(response.draft)
