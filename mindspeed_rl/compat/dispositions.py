"""What happens to a flag of Megatron-LM, MindSpeed or MindSpeed-LLM in an RL run.

Users append RL flags to an existing pretraining script, so every flag of that script needs an
answer: it is used, it is compared with the model, it changes nothing, or it is refused with the
fix. The tables beside this file hold one :class:`Group` per answer and reason. A group's rows are
words of the form ``--name|--alias:ARITY`` with one of the arity codes of argparse: ``0`` (switch),
``1`` (one value), ``?`` (at most one), ``+`` (one or more), ``*`` (any number).
``--name:ARITY=a,b`` in a refused group accepts the values ``a`` and ``b``, which ask for what RL
does anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

ARITIES = ("0", "1", "?", "+", "*")


class Disposition(Enum):
    """The answer to a foreign flag."""

    HONOURED = "honoured"
    """A field of the project's own configuration."""
    CHECKED_ARCH = "checked against the HF config"
    """A number of the model; accepted if the HF config says the same."""
    NO_MEANING = "no meaning"
    """Accepted; the RL step computes the same without it."""
    REFUSED = "refused"
    """An error: it would make results wrong or contradicts RL."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """One flag of a foreign parser and its disposition.

    Attributes:
        name: the spelling to show, with hyphens.
        aliases: further spellings of the same option.
        nargs: an arity code of ``ARITIES``.
        source: the project that defines the flag.
        reason: what a user should know or do; empty only for honoured flags.
        harmless_values: values of a refused flag that are accepted without effect.
    """

    name: str
    aliases: tuple[str, ...]
    nargs: str
    source: str
    disposition: Disposition
    reason: str
    harmless_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for spelling in self.spellings:
            assert spelling.startswith("--") and "_" not in spelling, spelling
        assert self.nargs in ARITIES, f"{self.name} has the arity {self.nargs!r}"
        refused = self.disposition is Disposition.REFUSED
        assert refused or not self.harmless_values, f"{self.name} is accepted with any value"
        honoured = self.disposition is Disposition.HONOURED
        assert honoured or self.reason, f"{self.name} has no reason"

    @property
    def spellings(self) -> tuple[str, ...]:
        """The name followed by its aliases."""
        return (self.name, *self.aliases)

    def refuses(self, values: tuple[str, ...]) -> bool:
        """Whether the flag with these values is an error."""
        if self.disposition is not Disposition.REFUSED:
            return False
        return not values or any(value not in self.harmless_values for value in values)


@dataclass(frozen=True, slots=True)
class Group:
    """Flags that share a disposition and a reason; ``rows`` is in the notation of this module."""

    disposition: Disposition
    reason: str
    rows: str

    def flags(self, source: str) -> Iterator[ForeignFlag]:
        """The flags of the group, as defined by ``source``."""
        for row in self.rows.split():
            spellings, colon, rest = row.partition(":")
            assert colon, f"the row {row!r} has no arity"
            nargs, _, harmless = rest.partition("=")
            name, *aliases = spellings.split("|")
            yield ForeignFlag(
                name=name,
                aliases=tuple(aliases),
                nargs=nargs,
                source=source,
                disposition=self.disposition,
                reason=self.reason,
                harmless_values=tuple(harmless.split(",")) if harmless else (),
            )


def table(*sources: tuple[str, tuple[Group, ...]]) -> dict[str, ForeignFlag]:
    """All flags of ``(source, groups)`` pairs by every spelling; each spelling occurs once."""
    flags: dict[str, ForeignFlag] = {}
    for source, groups in sources:
        for group in groups:
            for flag in group.flags(source):
                for spelling in flag.spellings:
                    assert spelling not in flags, f"{spelling} has two dispositions"
                    flags[spelling] = flag
    return flags
