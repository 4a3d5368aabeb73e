"""Turns: which ranks exchange in which of some consecutive rounds, so that messages are few.

Without turns every rank receives a little from every sender in every round. With ``count`` turns a
group of ``count`` rounds has all bytes that these rounds would have, and a pair of ranks exchanges
its part of them in one message, in the round of its turn. Pairs are spread like a Latin square: in
each round a sender serves one ``count``-th of its destinations, and each destination has one
``count``-th of its senders, so that all ranks stay as busy as they were.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mindspeed_rl.weights.sources import Ranks

Bytes = NDArray[np.float64]
TensorKind = TypeVar("TensorKind", bound=Hashable)

MOST_MESSAGES = 500
"""Messages per rank above which :func:`choose_turns` looks for turns."""

_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A group of rounds is full but for the last one, so there should be a few groups.
_LEAST_GROUPS = 4
# By how much turns, and rounds of their own for some tensors, may lengthen the critical path or the
# number of rounds.
_LONGER, _APART = 1.05, 1.08
# More turns are not tried where some are so much longer.
_TOO_LONG = 1.2


@dataclass(frozen=True, slots=True)
class RankTurns:
    """The turns of pairs of ranks in a group of rounds.

    Attributes:
        count: Number of turns and of rounds in a group; 1: all pairs exchange in every round.
        width: So many neighbouring destinations have the same turn.
        by_stage: Whether all senders of a pipeline stage have the same turns.
    """

    count: int = 1
    width: int = 1
    by_stage: bool = False

    def of(self, stage: Ranks, src: Ranks, dst: Ranks) -> Ranks:
        """Return the turns of pairs of ranks: numbers from 0 to ``count`` - 1.

        Args:
            stage: Pipeline stages of what is sent.
            src: Senders.
            dst: Destinations.
        """
        if self.count == 1:
            return np.zeros_like(dst)
        sender = stage if self.by_stage else digit_sum(src, self.count)
        return (digit_sum(dst // self.width, self.count) - sender) % self.count


def digit_sum(number: Ranks, base: int) -> Ranks:
    """Return the sum of the digits of numbers.

    Modulo the base it is spread evenly over neighbours and over numbers at distances of powers of
    the base: the Thue-Morse sequence and its generalisations. So are the destinations of a sender.
    """
    result: Ranks = _digit_sums(base, int(number.max(initial=0)).bit_length())[number]
    return result


@lru_cache(maxsize=256)
def _digit_sums(base: int, bits: int) -> Ranks:
    """Return the sums of the digits of all numbers of some binary digits."""
    rest: Ranks = np.arange(1 << bits)
    total = np.zeros_like(rest)
    while rest.any():
        total += rest % base
        rest = rest // base
    return total


@lru_cache(maxsize=1 << 16)
def turn_of(turns: RankTurns, stage: int, src: int, dst: int) -> int:
    """Return the turn of one pair of ranks, cached: :meth:`RankTurns.of` is for arrays."""
    return int(turns.of(*(np.array([number]) for number in (stage, src, dst)))[0])


ALL_AT_ONCE = RankTurns()


@dataclass(frozen=True, eq=False, slots=True)
class Demand:
    """What ranks send each other of some tensors of one pipeline stage.

    Attributes:
        stage: The pipeline stage.
        hop: [n] 0, or 1 for what is forwarded.
        src: [n] senders.
        dst: [n] destinations.
        size: [n] bytes.
        widths: Distances of ranks that need the same, which :attr:`RankTurns.width` may be.
    """

    stage: int
    hop: Ranks
    src: Ranks
    dst: Ranks
    size: Bytes
    widths: frozenset[int]

    @property
    def world(self) -> int:
        """The last of the ranks, plus one."""
        return 1 + int(max(self.src.max(initial=0), self.dst.max(initial=0)))

    def loads(self, turns: RankTurns, num_hops: int) -> Bytes:
        """Return the bytes that ranks send plus receive, by hop and turn: [hops x turns, world]."""
        stage = np.full(1, self.stage)
        exchange: Ranks = self.hop * turns.count + turns.of(stage, self.src, self.dst)
        shape = (num_hops * turns.count, self.world)
        return _sums(exchange, self.src, self.size, shape) + _sums(
            exchange, self.dst, self.size, shape
        )


def _sums(row: Ranks, column: Ranks, size: Bytes, shape: tuple[int, int]) -> Bytes:
    cells = row * shape[1] + column
    return np.bincount(cells, size, shape[0] * shape[1]).astype(np.float64).reshape(shape)


@dataclass(frozen=True, eq=False, slots=True)
class _Pairs:
    """The bytes of pairs of ranks, over all tensors: arrays of one entry per stage and pair."""

    stage: Ranks
    src: Ranks
    dst: Ranks
    size: Bytes
    world: int

    @classmethod
    def of(cls, demands: Sequence[tuple[Demand, int]]) -> _Pairs:
        world = max(demand.world for demand, _ in demands)
        stages = [np.full(d.src.size, d.stage) for d, _ in demands]
        stage, src, dst = (
            np.concatenate(several)
            for several in (stages, [d.src for d, _ in demands], [d.dst for d, _ in demands])
        )
        size = np.concatenate([d.size * times for d, times in demands])
        first = int(stage.min(initial=0))
        key, where = np.unique(((stage - first) * world + src) * world + dst, return_inverse=True)
        pair = key % (world * world)
        return cls(
            key // (world * world) + first,
            pair // world,
            pair % world,
            np.bincount(where, size, key.size).astype(np.float64),
            world,
        )

    def path(self, turns: RankTurns) -> tuple[float, float]:
        """Return bytes of a group of rounds with everything, each round by its busiest rank.

        The first number counts both directions, as staging does, the second the busier one.
        """
        turn = turns.of(self.stage, self.src, self.dst)
        shape = (turns.count, self.world)
        sent, received = (_sums(turn, end, self.size, shape) for end in (self.src, self.dst))
        both = (sent + received).max(axis=1).sum()
        return float(both), float(np.maximum(sent, received).max(axis=1).sum())

    def most_senders(self) -> int:
        """Return the largest number of ranks that one rank receives from."""
        pairs = np.unique(self.dst * self.world + self.src)
        return int(np.bincount(pairs // self.world).max(initial=0))


@dataclass(frozen=True, slots=True)
class TurnChoice:
    """Turns, and what is expected of them.

    Attributes:
        turns: The turns.
        messages: Messages that a rank receives at most, about.
        paths: Bytes of the busiest rank of each round, summed: as :meth:`_Pairs.path`.
        usual: The same without turns.
    """

    turns: RankTurns
    messages: float
    paths: tuple[float, float] = (0.0, 0.0)
    usual: tuple[float, float] = (0.0, 0.0)


def turns_of_kinds(
    demands: Mapping[TensorKind, Sequence[tuple[Demand, int]]], bucket_bytes: int
) -> tuple[dict[TensorKind, RankTurns], float]:
    """Choose the turns of several kinds of tensors: the same for all, or where that is not enough,
    turns of their own where that is no longer way, as such kinds do not travel in the same rounds.

    Args:
        demands: For each kind, what is sent, without a relay, and how often.
        bucket_bytes: Budget of one round.

    Returns:
        The turns of each kind, and the messages that a rank receives at most, about.
    """
    together = [entry for several in demands.values() for entry in several]
    choice = choose_turns(together, bucket_bytes, MOST_MESSAGES)
    if choice.messages > MOST_MESSAGES:
        few = MOST_MESSAGES // len(demands)
        apart = {kind: choose_turns(d, bucket_bytes, few) for kind, d in demands.items()}
        messages = sum(chosen.messages for chosen in apart.values())
        paths = zip(*(chosen.paths for chosen in apart.values()), strict=True)
        if messages < choice.messages and _longer(tuple(map(sum, paths)), choice.usual) <= _APART:
            return {kind: chosen.turns for kind, chosen in apart.items()}, messages
    return dict.fromkeys(demands, choice.turns), choice.messages


def choose_turns(demands: Sequence[tuple[Demand, int]], bucket_bytes: int, most: int) -> TurnChoice:
    """Choose the fewest turns with which no rank receives more than ``most`` messages, about.

    Turns with which ranks would wait for each other are out of the question, so that the number of
    messages may stay above. The choice is a pure function, alike on all ranks.

    Args:
        demands: What is sent, without a relay, and how often.
        bucket_bytes: Budget of one round.
        most: Number of messages that are few enough.
    """
    pairs = _Pairs.of(demands)
    usual = pairs.path(ALL_AT_ONCE)
    num_rounds = usual[0] / bucket_bytes
    messages = num_rounds * pairs.most_senders()
    chosen = TurnChoice(ALL_AT_ONCE, messages, usual, usual)
    num_stages = len(np.unique(pairs.stage))
    widths = sorted(set().union(*(demand.widths for demand, _ in demands)))
    for count in _COUNTS:
        if chosen.messages <= most or count > num_rounds / _LEAST_GROUPS:
            break
        paths = {turns: pairs.path(turns) for turns in _turns_of(count, widths, num_stages)}
        turns = min(paths, key=lambda turns: _longer(paths[turns], usual))
        longer = _longer(paths[turns], usual)
        if longer <= _LONGER:
            chosen = TurnChoice(turns, messages / count, paths[turns], usual)
        elif longer > _TOO_LONG:
            break
    return chosen


def _longer(paths: Sequence[float], usual: Sequence[float]) -> float:
    """Return by which factor some paths are longer than the usual ones."""
    return max(now / before for now, before in zip(paths, usual, strict=True))


def _turns_of(count: int, widths: Iterable[int], num_stages: int) -> Iterable[RankTurns]:
    yield RankTurns(count)
    if count <= num_stages:
        yield from (RankTurns(count, width, by_stage=True) for width in widths)
