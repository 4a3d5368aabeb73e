"""Classification of a command line: the project's own flags, and dispositions of all others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.compat.foreign_flags import Disposition, ForeignFlag

# A flag with one dash, such as -lr or -lr=3, and no negative number such as -3, -.5 or -inf.
_ONE_DASH = re.compile(r"-(?!inf$|nan$)[A-Za-z][\w-]+(=.*)?", re.DOTALL)
# An override of verl; data.jsonl=0.5 is a share of a data set, as is that of any file or folder.
_OVERRIDE = re.compile(
    r"\+{0,2}(actor_rollout_ref|algorithm|critic|custom_reward_function|data|reward|reward_model"
    r"|trainer)(\.\w+)*\.(?!(arrow|csv|jsonl?|parquet)=)\w+=.*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class UsedFlag:
    """A foreign flag as it was found: canonical name, values, and the reason for its answer."""

    flag: str
    values: tuple[str, ...]
    reason: str

    @property
    def typed(self) -> str:
        """The flag with its values."""
        return " ".join([self.flag, *self.values])


@dataclass(frozen=True, slots=True)
class UnknownToken:
    """A token that no table explains, with at most three usable flags that are spelled like it.

    A token that is not a flag is a stray value: one more value than the flag before it takes.
    """

    token: str
    nearest: list[str]


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """A classified command line; each list keeps the order of the command line.

    Attributes:
        own: The project's own flags in their own spelling, each with its values.
        accepted: Flags that change nothing.
        without: Flags that save time or memory, which the run goes on without; with the reason.
        compared: Flags with model numbers to compare with the HF config.
        refused: Flags that end the run; the reason says what to do instead.
        unknown: Tokens that no table explains; they end the run.
        malformed: A line for every flag with too few values, and every switch with one.
    """

    own: list[tuple[str, list[str]]] = field(default_factory=list)
    accepted: list[UsedFlag] = field(default_factory=list)
    without: list[UsedFlag] = field(default_factory=list)
    compared: list[UsedFlag] = field(default_factory=list)
    refused: list[UsedFlag] = field(default_factory=list)
    unknown: list[UnknownToken] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


def classify(
    argv: Sequence[str], own_flags: Collection[str], foreign: Mapping[str, ForeignFlag]
) -> ForeignUse:
    """Sort ``argv`` by what each flag means in an RL run.

    An own flag keeps all its values, up to the next token that starts with ``--`` or is an own
    flag; behind its first value a word with one dash, like ``-lr``, ends them as well and is an
    unknown flag, and so does an override of verl, like ``algorithm.gamma=1``.

    An own flag wins over a foreign flag of the same spelling. Spellings match exactly (no
    prefixes), ``_`` and ``-`` being equal. ``--flag=value`` is one flag with one value.

    Args:
        argv: Tokens after the program name.
        own_flags: All option strings of the project's own parser, with their dashes.
        foreign: Foreign flags by spelling.
    """
    use = ForeignUse()
    by_disposition = {
        Disposition.ACCEPTED: use.accepted,
        Disposition.WITHOUT: use.without,
        Disposition.COMPARED: use.compared,
        Disposition.REFUSED: use.refused,
    }
    position = 0
    while position < len(argv):
        token = argv[position]
        written, equals, attached = token.partition("=")
        name = written.replace("_", "-")
        own = written if written in own_flags else name
        position += 1
        end = _end_of_values(argv, position, own_flags)
        values = argv[position:end]
        if own in own_flags:
            use.own.append((own, [attached, *values] if equals else [*values]))
            position = end
        elif name in foreign:
            given = (attached,) if equals else tuple(values)
            if mistake := _miscounted(foreign[name], written, given, attached=bool(equals)):
                use.malformed.append(mistake)
            taken = _taken(foreign[name], given)
            disposition = foreign[name].disposition_of(taken)
            by_disposition[disposition].append(
                UsedFlag(foreign[name].name, taken, foreign[name].reason)
            )
            position += 0 if equals else len(taken)
        elif token.startswith("--") or _ONE_DASH.fullmatch(token):
            use.unknown.append(UnknownToken(token, _nearest(name, own_flags, foreign)))
            position = end
        else:
            use.unknown.append(UnknownToken(token, []))
    return use


def _end_of_values(argv: Sequence[str], start: int, own_flags: Collection[str]) -> int:
    """The position of the next flag, or the end of the command line."""
    for position in range(start, len(argv)):
        token = argv[position]
        if token.startswith("--") or (token.startswith("-") and token in own_flags):
            return position
        if position > start and (_ONE_DASH.fullmatch(token) or _is_override(token)):
            return position
    return len(argv)


def _is_override(token: str) -> bool:
    return bool(_OVERRIDE.fullmatch(token)) and not Path(token.partition("=")[0]).exists()


def _miscounted(flag: ForeignFlag, written: str, values: tuple[str, ...], *, attached: bool) -> str:
    """Say which values a flag lacks or has too many; empty where it has what it needs."""
    if flag.nargs == "0" and attached:
        return f"{written} is a switch, got the value {values[0]!r}; remove it"
    if flag.nargs in "1+" and not values:
        wanted = "one value" if flag.nargs == "1" else "one or more values"
        return f"{written} takes {wanted}, got none; add it or remove the flag"
    return ""


def _taken(flag: ForeignFlag, values: tuple[str, ...]) -> tuple[str, ...]:
    """The leading ``values`` that belong to ``flag``, which are as many as it needs."""
    if flag.nargs == "0":
        return ()
    return values[:1] if flag.nargs in "1?" else values


def _nearest(
    name: str, own_flags: Collection[str], foreign: Mapping[str, ForeignFlag]
) -> list[str]:
    usable = {s for s, flag in foreign.items() if flag.disposition is not Disposition.REFUSED}
    wanted = "-" + name if not name.startswith("--") else name
    return difflib.get_close_matches(wanted, sorted(usable.union(own_flags)))
