"""Reader of ``foreign_flags.toml``: answers to flags of Megatron-LM, MindSpeed and MindSpeed-LLM.

Users append RL flags to an existing pretraining script, so every flag of that script needs an
answer: it is a flag of this project, it is compared with the model, it changes nothing, the run
goes on without what it saves, or it is refused with the fix.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from mindspeed_rl.core.errors import UsageError


class Disposition(Enum):
    """The answer to a foreign flag; the value of a member is its section of the file."""

    COMPARED = "compared"
    """A number of the model; accepted if the HF config says the same."""
    ACCEPTED = "accepted"
    """The RL step computes the same without the flag."""
    WITHOUT = "without"
    """The flag saves time or memory and changes no result: the run goes on without, and says so."""
    REFUSED = "refused"
    """An error: the flag would make results wrong or contradicts RL."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an architecture flag is compared with; the notation is explained in the file.

    Attributes:
        feature: Name of the feature that a model without the value lacks, in words after "has no".
        where: Place of the value in the HF config.
        unset: Values that a model without the feature accepts: zero or Megatron's default.
    """

    feature: str
    where: str
    unset: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One flag of a foreign parser and its disposition.

    Attributes:
        name: Spelling to show, with hyphens.
        aliases: Further spellings of the same option.
        nargs: Number of values: ``0`` (a switch), ``1``, ``?`` (at most one), ``+`` (one or more)
            or ``*`` (any).
        reason: What a user should know or do.
        harmless_values: Values that ask for what happens anyway; with them a flag is accepted.
        comparison: What a compared flag is compared with; ``None`` for other flags.
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
        return (self.name, *self.aliases)

    def disposition_of(self, values: tuple[str, ...]) -> Disposition:
        """The answer to the flag with these values."""
        if values and set(values) <= set(self.harmless_values):
            return Disposition.ACCEPTED
        return self.disposition


@cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Read the known flags of the three projects: every spelling -> its flag."""
    return read_flags(Path(__file__).with_suffix(".toml").read_text())


def read_flags(text: str) -> Mapping[str, ForeignFlag]:
    """Read a text in the notation of ``foreign_flags.toml``: every spelling -> its flag.

    Raises:
        UsageError: A flag has two dispositions.
    """
    flags: dict[str, ForeignFlag] = {}
    for flag in _flags(tomllib.loads(text)):
        for spelling in flag.spellings:
            if spelling in flags:
                raise UsageError(f"{spelling} has two dispositions")
            flags[spelling] = flag
    return flags


def _flags(file: Mapping[str, object]) -> Iterator[ForeignFlag]:
    for disposition in (Disposition.REFUSED, Disposition.ACCEPTED):
        groups = file.get(disposition.value, {})
        assert isinstance(groups, dict)
        for reason, words in groups.items():
            yield from (_flag(word, disposition, reason) for word in words.split())
    left_out = file.get(Disposition.WITHOUT.value, [])
    assert isinstance(left_out, list)
    for reason, words in left_out:
        yield from (_flag(word, Disposition.WITHOUT, reason) for word in words.split())
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
    values = tuple(harmless.split(",")) if harmless else ()
    return ForeignFlag(name, tuple(aliases), nargs or "1", disposition, reason, values, comparison)
