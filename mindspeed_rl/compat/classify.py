"""Classification of a command line: the project's own flags, and dispositions of all others."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rl.compat.foreign_flags import Disposition, ForeignFlag, foreign_flags
from mindspeed_rl.core.errors import UsageError


def nearest(name: str, known: Iterable[str], n: int = 3) -> tuple[str, ...]:
    """The at most ``n`` spellings of ``known`` closest to ``name``, best first; may be empty."""
    return tuple(difflib.get_close_matches(_hyphenated(name), sorted(set(known)), n))


@dataclass(frozen=True, slots=True)
class UsedFlag:
    """A foreign flag as it was found: canonical name, values, and the reason for its answer."""

    flag: str
    values: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class UnknownToken:
    """A token that no table explains, with the closest usable flags.

    A token that is not a flag is a stray value: one more value than the flag before it takes.
    """

    token: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """A classified command line; each tuple keeps the order of the command line.

    Attributes:
        own_argv: Tokens for the project's own parser, foreign spellings of own flags renamed.
        accepted: Flags that change nothing.
        compared: Flags with model numbers to compare with the HF config.
        refused: Flags that end the run; the reason says what to do instead.
        unknown: Tokens that no table explains; they end the run.
    """

    own_argv: tuple[str, ...]
    accepted: tuple[UsedFlag, ...]
    compared: tuple[UsedFlag, ...]
    refused: tuple[UsedFlag, ...]
    unknown: tuple[UnknownToken, ...]


def classify(
    argv: Sequence[str],
    own_flags: Collection[str],
    foreign: Mapping[str, ForeignFlag] | None = None,
) -> ForeignUse:
    """Sort ``argv`` by what each flag means in an RL run.

    An own flag keeps all its values, up to the next token that starts with ``--`` or is an own
    flag; it wins over a foreign flag of the same spelling. Spellings match exactly (no prefixes),
    ``_`` and ``-`` being equal. ``--flag=value`` is one flag with one value.

    Args:
        argv: Tokens after the program name.
        own_flags: All option strings of the project's own parser, with their dashes.
        foreign: Table of foreign flags; :func:`foreign_flags` by default.

    Raises:
        UsageError: A foreign flag has fewer values than it needs, or a switch has a value.
    """
    return _Walk(argv, own_flags, foreign_flags() if foreign is None else foreign).run()


class _Walk:
    """One pass over a command line, which collects the lists of :class:`ForeignUse`."""

    def __init__(
        self, argv: Sequence[str], own_flags: Collection[str], foreign: Mapping[str, ForeignFlag]
    ) -> None:
        self.argv = tuple(argv)
        self.own = frozenset(own_flags)
        self.foreign = foreign
        self.own_argv: list[str] = []
        self.by_disposition: dict[Disposition, list[UsedFlag]] = {kind: [] for kind in Disposition}
        self.unknown: list[UnknownToken] = []

    def run(self) -> ForeignUse:
        position = 0
        while position < len(self.argv):
            position = self._take(position)
        return ForeignUse(
            own_argv=tuple(self.own_argv),
            accepted=tuple(self.by_disposition[Disposition.ACCEPTED]),
            compared=tuple(self.by_disposition[Disposition.COMPARED]),
            refused=tuple(self.by_disposition[Disposition.REFUSED]),
            unknown=tuple(self.unknown),
        )

    def _take(self, position: int) -> int:
        """Sort the flag at ``position`` with its values; return the position after them."""
        token = self.argv[position]
        written, equals, attached = token.partition("=")
        name = _hyphenated(written)
        end = self._end_of_values(position + 1)
        own = written if written in self.own else name
        if own in self.own:
            self.own_argv += [own + equals + attached, *self.argv[position + 1 : end]]
            return end
        known = self.foreign.get(name)
        if known is not None:
            values = (attached,) if equals else self.argv[position + 1 : end]
            self._sort(known, written, values, bool(equals))
            return position + 1 + (0 if equals else len(_taken(known, values)))
        if not token.startswith("--"):
            self.unknown.append(UnknownToken(token, ()))
            return position + 1
        self.unknown.append(UnknownToken(token, nearest(name, self._usable())))
        return end

    def _sort(
        self, flag: ForeignFlag, written: str, values: tuple[str, ...], attached: bool
    ) -> None:
        """Put a flag and its values into the list of its disposition."""
        if flag.nargs == "0" and attached:
            raise UsageError(f"{written} is a switch, got the value {values[0]!r}; remove it")
        taken = _taken(flag, values)
        if flag.nargs in "1+" and not taken:
            wanted = "one value" if flag.nargs == "1" else "one or more values"
            raise UsageError(f"{written} takes {wanted}, got none; add it or remove the flag")
        disposition = flag.disposition
        if disposition is Disposition.REFUSED and not flag.refuses(taken):
            disposition = Disposition.ACCEPTED
        self.by_disposition[disposition].append(UsedFlag(flag.name, taken, flag.reason))

    def _end_of_values(self, start: int) -> int:
        for position in range(start, len(self.argv)):
            token = self.argv[position]
            if token.startswith("--") or (token.startswith("-") and token in self.own):
                return position
        return len(self.argv)

    def _usable(self) -> set[str]:
        accepted = (
            spelling
            for spelling, flag in self.foreign.items()
            if flag.disposition is not Disposition.REFUSED
        )
        return {*self.own, *accepted}


def _taken(flag: ForeignFlag, values: tuple[str, ...]) -> tuple[str, ...]:
    """The leading ``values`` that belong to ``flag``."""
    if flag.nargs == "0":
        return ()
    return values[:1] if flag.nargs in "1?" else values


def _hyphenated(flag: str) -> str:
    return flag.replace("_", "-")
