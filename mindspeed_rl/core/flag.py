"""Dataclass fields that are command-line flags: their metadata, limits and spellings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Needs:
    """The condition on one flag under which another flag is read.

    Attributes:
        flag: Spelling of the deciding flag on the command line.
        values: Values of the deciding flag with which the other flag is read; empty: every value
            but the one that turns it off (0, an empty text, a switch that is not given).
    """

    flag: str
    values: tuple[str, ...] = ()

    def met_by(self, value: object) -> bool:
        """Whether the other flag is read when the deciding flag has this value.

        For a list it is when any of its values makes it so.
        """
        if not self.values:
            return bool(value)
        return any(one in self.values for one in (value if isinstance(value, tuple) else (value,)))

    def __str__(self) -> str:
        *first, last = self.values or ("",)
        chosen = f"{', '.join(first)} or {last}" if first else last
        return f"{self.flag} {chosen}".strip()


@dataclasses.dataclass(frozen=True, slots=True)
class FlagInfo:
    """Everything about a flag that the annotation of its field does not say.

    Attributes:
        help: Description of the flag in one or two sentences, units included.
        names: Spellings of the flag; the first is the canonical one.
        choices: Allowed values; empty for any value.
        minimum: Smallest allowed number; ``None`` for any.
        maximum: Largest allowed number; ``None`` for any.
        below: The number must be smaller than this; ``None`` for any.
        nargs: What argparse takes for lists (``"*"`` or ``"+"``); ``None`` for a single value.
        compared: Whether the flag is compared with the model and changes nothing else.
        above: The number must be larger than this; ``None`` for any.
        needs: Condition under which the flag is read; ``None``: always.
    """

    help: str
    names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    nargs: str | None = None
    compared: bool = False
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
        """The limits in words, like ``at least 0 and below 1``; empty where there are none."""
        named = (
            ("at least", self.minimum),
            ("more than", self.above),
            ("at most", self.maximum),
            ("below", self.below),
        )
        return " and ".join(
            f"{word} {limit if isinstance(limit, int) else format(limit, 'g')}"
            for word, limit in named
            if limit is not None
        )


def flag(default: Any, help: str, choices: Iterable[str] = (), **info: Any) -> Any:
    """Make a dataclass field that is a flag, canonically spelled like the field with dashes.

    Args:
        default: Value when the flag is not given.
        help: See `FlagInfo`.
        choices: Allowed values; empty for any value.
        info: Other fields of `FlagInfo`.
    """
    flag_info = FlagInfo(help, choices=tuple(choices), **info)
    return dataclasses.field(default=default, metadata={"flag": flag_info})


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """All spellings of a field's flag, canonical first; a switch that is on gets ``--no-``."""
    info: FlagInfo = field.metadata["flag"]
    prefix = "--no-" if field.default is True else "--"
    canonical = info.names or (prefix + field.name.replace("_", "-"),)
    return tuple(canonical)
