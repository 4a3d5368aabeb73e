"""How a dataclass field becomes a command-line flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class FlagInfo:
    """Everything about a flag that the annotation of its field does not say.

    Attributes:
        help: one or two sentences, units included.
        names: spellings; the first is the canonical one.
        choices: allowed values; empty for any.
        minimum: smallest allowed number; ``None`` for any.
        nargs: ``"*"`` for lists.
    """

    help: str
    names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    nargs: str | None = None


def flag(
    default: Any,
    help: str,
    *,
    names: Iterable[str] = (),
    choices: Iterable[str] = (),
    minimum: float | None = None,
    nargs: str | None = None,
) -> Any:
    """A dataclass field that is a flag; its canonical spelling is the field name with dashes."""
    info = FlagInfo(help, tuple(names), tuple(choices), minimum, nargs)
    return dataclasses.field(default=default, metadata={"flag": info})


def flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """All spellings of a field's flag, canonical first; switches that are on get ``--no-``."""
    info: FlagInfo = field.metadata["flag"]
    prefix = "--no-" if field.default is True else "--"
    canonical = info.names or (prefix + field.name.replace("_", "-"),)
    return tuple(canonical)
