"""Reads ``foreign_flags.toml``: what happens to a flag of Megatron-LM, MindSpeed or MindSpeed-LLM.

Users append RL flags to an existing pretraining script, so every flag of that script needs an
answer: it is one of ours, it is compared with the model, it changes nothing, or it is refused with
the fix.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType

from mindspeed_rl.core.errors import UsageError

ARITIES = ("0", "1", "?", "+", "*")
"""A switch, one value, at most one, one or more, any number."""


class Disposition(Enum):
    """The answer to a flag that is none of ours; the value is its section of the file."""

    COMPARED = "compared"
    """A number of the model; accepted if the HF config says the same."""
    ACCEPTED = "accepted"
    """The RL step computes the same without it."""
    REFUSED = "refused"
    """An error: it would make results wrong or contradicts RL."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an architecture flag is compared with; the notation is explained in the file.

    Attributes:
        feature: what a model lacks in which the value is not found, in words after "has no".
        where: the value in the HF config.
        unset: values that a model without the feature accepts: zero or Megatron's default.
    """

    feature: str
    where: str
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One flag of a foreign parser and its disposition.

    Attributes:
        name: the spelling to show, with hyphens.
        aliases: further spellings of the same option.
        nargs: an arity code of ``ARITIES``.
        reason: what a user should know or do.
        harmless_values: values of a refused flag that are accepted without effect.
        comparison: of a flag that is compared, else ``None``.
    """

    name: str
    aliases: tuple[str, ...]
    nargs: str
    disposition: Disposition
    reason: str
    harmless_values: tuple[str, ...] = ()
    comparison: Comparison | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        """The name followed by its aliases."""
        return (self.name, *self.aliases)

    def refuses(self, values: tuple[str, ...]) -> bool:
        """Whether the flag with these values is an error."""
        if self.disposition is not Disposition.REFUSED:
            return False
        return not values or any(value not in self.harmless_values for value in values)


@cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Every known flag of the three projects by every spelling.

    Spellings have hyphens; :func:`~mindspeed_rl.compat.classify` reads ``--use_flash_attn`` as
    ``--use-flash-attn``.
    """
    return read_flags(Path(__file__).with_suffix(".toml").read_text())


def read_flags(text: str) -> Mapping[str, ForeignFlag]:
    """The flags of a file in the notation of ``foreign_flags.toml`` by every spelling.

    Raises:
        UsageError: a flag with two dispositions, an arity that does not exist, or values of a flag
            that is accepted with any value.
    """
    flags: dict[str, ForeignFlag] = {}
    for flag in _flags(tomllib.loads(text)):
        for spelling in flag.spellings:
            if spelling in flags:
                raise UsageError(f"{spelling} has two dispositions")
            flags[spelling] = flag
    return MappingProxyType(flags)


def _flags(file: Mapping[str, object]) -> Iterator[ForeignFlag]:
    for disposition in (Disposition.REFUSED, Disposition.ACCEPTED):
        groups = file.get(disposition.value, {})
        assert isinstance(groups, dict)
        for reason, words in groups.items():
            yield from (_flag(word, disposition, reason) for word in words.split())
    rows = file.get(Disposition.COMPARED.value, [])
    assert isinstance(rows, list)
    for words, feature, where, unset in rows:
        comparison = Comparison(feature, where, tuple(unset.split()))
        reason = f"compared with the {feature} of the HF config"
        for word in words.split():
            yield _flag(word, Disposition.COMPARED, reason, comparison)


def _flag(
    word: str, disposition: Disposition, reason: str, comparison: Comparison | None = None
) -> ForeignFlag:
    rest, _, harmless = word.partition("=")
    spellings, _, nargs = rest.partition(":")
    name, *aliases = (f"--{spelling}" for spelling in spellings.split("|"))
    if (nargs or "1") not in ARITIES:
        raise UsageError(f"{word}: no such number of values; known are {', '.join(ARITIES)}")
    if harmless and disposition is not Disposition.REFUSED:
        raise UsageError(f"{word}: only a refused flag has values that are accepted")
    values = tuple(harmless.split(",")) if harmless else ()
    return ForeignFlag(name, tuple(aliases), nargs or "1", disposition, reason, values, comparison)
