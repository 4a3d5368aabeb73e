"""What a rank does in collectives, and the sentences that say which rank is missing where.

A flight record, as PyTorch calls it, holds the last collectives of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.core.ranks import rank_ranges

_MOST_LINES = 4
# Ranks may give tensors of different shapes to these.
_SHAPES_DIFFER = ("alltoall", "alltoall_base", "all_to_all_single", "scatter", "gather")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective, or of a send or receive, by one rank.

    Attributes:
        group: Name of the process group, the same on all of its ranks.
        title: Description of the group for people.
        ranks: Global ranks of the group.
        number: How many collectives of the group this rank had begun with it; 0 for a send or
            receive, which are counted by nobody else.
        operation: What was called.
        shape: Dtype and shape of the first tensor.
        peer: Global rank of the other end of a send or receive; -1 for a collective.
        where: File and line of the caller.
        waits: Whether the rank waits for its end.
        seconds: Time since it began.
    """

    group: str
    title: str
    ranks: tuple[int, ...]
    number: int
    operation: str
    shape: str
    peer: int
    where: str
    waits: bool
    seconds: float

    def __str__(self) -> str:
        number = f" no. {self.number}" if self.number else ""
        towards = {"send": f" to rank {self.peer}"}.get(self.operation, f" from rank {self.peer}")
        peer = towards if self.peer >= 0 else ""
        members = rank_ranges(self.ranks)
        return (
            f"{self.operation}{number}{peer} of {self.title} (ranks {members}), {self.shape}, at "
            f"{self.where}"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands: how many collectives of each group it began, and its present calls.

    Attributes:
        numbers: Number of collectives that it began, by the name of the group.
        calls: The calls that it waits for; if it waits for none, the last one.
        last: The last collective that it began of each group.
    """

    numbers: Mapping[str, int]
    calls: tuple[Call, ...]
    last: tuple[Call, ...] = ()

    @property
    def waits(self) -> tuple[Call, ...]:
        """The calls that it waits for."""
        return tuple(call for call in self.calls if call.waits)

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> Position:
        """Return the position whose fields went through JSON."""
        calls, last = fields["calls"], fields["last"]
        numbers = fields["numbers"]
        assert isinstance(calls, list) and isinstance(last, list) and isinstance(numbers, dict)
        return cls(numbers, *(tuple(map(_call_from_json, some)) for some in (calls, last)))

    def last_of(self, group: str) -> Call | None:
        """The last collective of a group that it began; ``None``: none."""
        return next((call for call in self.last if call.group == group), None)


def _call_from_json(fields: Mapping[str, Any]) -> Call:
    return Call(**{**fields, "ranks": tuple(fields["ranks"])})


def stuck_lines(positions: Mapping[int, Position], phases: Mapping[int, str]) -> list[str]:
    """Say which ranks wait in which collective, and who is missing there.

    What is certain comes first: a wait for a rank that waits for nobody itself. With NCCL and HCCL
    a wait for a collective returns at once. Where nobody waits, the numbers of collectives that
    the ranks began are compared, see :func:`_behind_lines`.

    Args:
        positions: Where the ranks stand that answered.
        phases: Phase of every rank, those without an answer included.
    """
    found: dict[str, bool] = {}
    waits = [(rank, call) for rank, position in positions.items() for call in position.waits]
    collectives = {(call.group, call.number) for _, call in waits if call.peer < 0}
    for key in sorted(collectives):
        inside = {r: c for r, c in waits if (c.group, c.number) == key and c.peer < 0}
        line, certain = _of_collective(inside, positions, phases)
        found[line] = certain
    for rank, call in waits:
        if call.peer >= 0:
            line = f"rank {rank} waits in {call}; {_stand(call.peer, positions, phases)}"
            found[line] = not _waits(call.peer, positions)
    if not found:
        return _behind_lines(positions, phases)
    return _first(sorted(found, key=lambda line: not found[line]), "waits")


def _first(lines: list[str], what: str) -> list[str]:
    more = [f"and {len(lines) - _MOST_LINES} more such {what}"] if len(lines) > _MOST_LINES else []
    return lines[:_MOST_LINES] + more


def _behind_lines(positions: Mapping[int, Position], phases: Mapping[int, str]) -> list[str]:
    """Say which ranks have begun fewer collectives of a group than the others of it.

    Ranks that are ahead in no group come first: the others are where they wait for them.
    """
    newest: dict[str, Call] = {}
    for position in positions.values():
        for call in position.last:
            if call.number > newest.get(call.group, call).number or call.group not in newest:
                newest[call.group] = call
    behind = {
        group: [
            rank
            for rank in call.ranks
            if rank not in positions or positions[rank].numbers.get(group, 0) < call.number
        ]
        for group, call in newest.items()
    }
    ahead = {
        rank
        for group, late in behind.items()
        if late
        for rank in newest[group].ranks
        if rank not in late
    }
    uneven = sorted((g for g in behind if behind[g]), key=lambda g: bool(ahead & {*behind[g]}))
    return _first(
        [_of_group(newest[group], behind[group], positions, phases) for group in uneven]
        + [
            line
            for group, call in newest.items()
            if group not in uneven and (line := _unlike(call, positions))
        ],
        "groups",
    )


def _of_group(
    newest: Call,
    behind: Sequence[int],
    positions: Mapping[int, Position],
    phases: Mapping[int, str],
) -> str:
    """Return the line about a group of which some ranks have not begun the newest collective."""
    there = [rank for rank in newest.ranks if rank not in behind]
    told = []
    for rank in behind[:_MOST_LINES]:
        phase = f"phase {phases[rank]}" if rank in phases else "phase unknown"
        if rank not in positions:
            told.append(f"rank {rank} ({phase}) gives no answer")
        elif last := positions[rank].last_of(newest.group):
            told.append(
                f"the last that rank {rank} ({phase}) began there is {last.operation} no. "
                f"{last.number}, {last.shape}, at {last.where}"
            )
        else:
            told.append(f"rank {rank} ({phase}) has begun none there")
    verb = "has" if len(there) == 1 else "have"
    return (
        f"nobody waits on the host; rank {rank_ranges(there)} {verb} begun {newest}; behind: rank "
        f"{rank_ranges(behind)}; {'; '.join(told)}"
    )


def _unlike(newest: Call, positions: Mapping[int, Position]) -> str:
    """Say which ranks began another collective in the same place; empty: none."""
    lasts = {r: positions[r].last_of(newest.group) for r in newest.ranks if r in positions}
    others = [
        f"rank {rank} calls {call.operation}, {call.shape}, at {call.where}"
        for rank, call in lasts.items()
        if call
        and call.number == newest.number
        and (call.operation, call.shape) != (newest.operation, newest.shape)
    ]
    if not others or newest.operation in _SHAPES_DIFFER:
        return ""
    return f"nobody waits on the host; the last in the group is {newest}; but {'; '.join(others)}"


def _of_collective(
    inside: Mapping[int, Call], positions: Mapping[int, Position], phases: Mapping[int, str]
) -> tuple[str, bool]:
    """Return the line about a collective, and whether its missing ranks wait nowhere."""
    first = inside[min(inside)]
    verb = "waits" if len(inside) == 1 else "wait"
    parts = [f"rank {rank_ranges(inside)} {verb} in {first}"]
    missing = [
        rank
        for rank in first.ranks
        if rank not in inside
        and (rank not in positions or positions[rank].numbers.get(first.group, 0) < first.number)
    ]
    others = {
        r: c for r, c in inside.items() if (c.operation, c.shape) != (first.operation, first.shape)
    }
    if missing:
        names = "; ".join(_stand(rank, positions, phases) for rank in missing[:_MOST_LINES])
        parts.append(f"missing there: rank {rank_ranges(missing)}; {names}")
    parts += [
        f"but rank {r} calls {c.operation}, {c.shape}, at {c.where}" for r, c in others.items()
    ]
    idle = bool(missing) and not any(_waits(rank, positions) for rank in missing)
    certain = bool(others) or idle
    return "; ".join(parts), certain


def _waits(rank: int, positions: Mapping[int, Position]) -> bool:
    return rank in positions and bool(positions[rank].waits)


def _stand(rank: int, positions: Mapping[int, Position], phases: Mapping[int, str]) -> str:
    """Say what a rank does that others wait for."""
    phase = f"phase {phases[rank]}" if rank in phases else "phase unknown"
    position = positions.get(rank)
    if position is None:
        return f"rank {rank} ({phase}) gives no answer"
    if position.waits:
        return f"rank {rank} ({phase}) waits in {position.waits[0]}"
    last = f"; its last was {position.calls[0]}" if position.calls else ""
    return f"rank {rank} ({phase}) is in no collective{last}"


def stuck_text(positions: Mapping[int, Position], phases: Mapping[int, str]) -> str:
    """Return the sentences of :func:`stuck_lines`; empty where the ranks are in step."""
    return _joined(stuck_lines(positions, phases))


def _joined(lines: Sequence[str]) -> str:
    return f". Collectives: {'. '.join(lines)}" if lines else ""


def recent_lines(calls: Iterable[Call]) -> list[str]:
    """Return a line for each call of this rank, the oldest first."""
    return [
        f"  {call.seconds:.1f} s ago{', waits' if call.waits else ''}: {call}" for call in calls
    ]
