"""How a dataclass field becomes a command-line flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """The flag that decides whether another one is read.

    Attributes:
        flag: as it is typed.
        values: those with which the other one is read; empty: all but the one that is off (0, no
            text, a switch that is not given).
    """

    flag: str
    values: tuple[str, ...] = ()

    def met_by(self, value: object) -> bool:
        """Whether the other flag is read while this one has a value."""
        return value in self.values if self.values else bool(value)

    def __str__(self) -> str:
        *first, last = self.values or ("",)
        chosen = f"{', '.join(first)} or {last}" if first else last
        return f"{self.flag} {chosen}".strip()


@dataclasses.dataclass(frozen=True, slots=True)
class FlagInfo:
    """Everything about a flag that the annotation of its field does not say.

    Attributes:
        help: one or two sentences, units included.
        names: spellings; the first is the canonical one.
        choices: allowed values; empty for any.
        minimum: smallest allowed number; ``None`` for any.
        maximum: largest allowed number; ``None`` for any.
        below: the number must be smaller than this; ``None`` for any.
        nargs: ``"*"`` for lists.
        inert: accepted for scripts that have it; a run that is given it says so at its start.
        above: the number must be larger than this; ``None`` for any.
        needs: what decides whether it is read; ``None``: it always is.
    """

    help: str
    names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    nargs: str | None = None
    inert: bool = False
    above: float | None = None
    needs: Needs | None = None

    def allows(self, value: float) -> bool:
        """Whether a number is within the limits."""
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
            and (self.above is None or value > self.above)
        )

    @property
    def limits(self) -> str:
        """The limits in words, like ``at least 0 and below 1``; empty without limits."""
        named = (
            ("at least", self.minimum),
            ("more than", self.above),
            ("at most", self.maximum),
            ("below", self.below),
        )
        return " and ".join(f"{word} {limit:g}" for word, limit in named if limit is not None)


def flag(
    default: Any,
    help: str,
    *,
    names: Iterable[str] = (),
    choices: Iterable[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    nargs: str | None = None,
    inert: bool = False,
    above: float | None = None,
    needs: Needs | None = None,
) -> Any:
    """A dataclass field that is a flag; its canonical spelling is the field name with dashes."""
    info = FlagInfo(
        help, tuple(names), tuple(choices), minimum, maximum, below, nargs, inert, above, needs
    )
    return dataclasses.field(default=default, metadata={"flag": info})


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """All spellings of a field's flag, canonical first; switches that are on get ``--no-``."""
    info: FlagInfo = field.metadata["flag"]
    prefix = "--no-" if field.default is True else "--"
    canonical = info.names or (prefix + field.name.replace("_", "-"),)
    return tuple(canonical)
