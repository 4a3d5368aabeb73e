"""Checks of flags that are read only with a certain value of another flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from mindspeed_rl.algorithms.advantages import ESTIMATORS
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES
from mindspeed_rl.core.errors import refuse
from mindspeed_rl.core.flag import FlagInfo, Needs, flag_names


def needs_of(field: dataclasses.Field[Any]) -> Needs | None:
    """The condition that a flag declares itself, or that the algorithms which read it imply."""
    info: FlagInfo = field.metadata["flag"]
    if info.needs is not None:
        return info.needs
    for catalogue in (ESTIMATORS, POLICY_LOSSES):
        if readers := catalogue.readers(field.name):
            return Needs(catalogue.flag, readers)
    return None


def check_needs(config: Any) -> None:
    """Refuse a flag that was changed where nothing reads it. Local.

    Args:
        config: Configuration of an entry.

    Raises:
        UsageError: There are such flags; each message names one, what it needs and the fix.
    """
    refuse(one.line for one in _unread(config) if one.changed)


def unread_beside(config: Any, typed: Collection[str]) -> list[str]:
    """Return what to say of flags that were typed with their default where nothing reads them.

    Alone such a flag ends no run. Beside one that :func:`check_needs` refuses for the same flag, it
    is the next to remove. Local.

    Args:
        config: Configuration of an entry.
        typed: Canonical spellings of the flags that were typed.
    """
    unread = _unread(config)
    deciding = {one.deciding for one in unread if one.changed}
    return [
        one.line
        for one in unread
        if one.deciding in deciding and one.name in typed and not one.changed
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Unread:
    """A flag that nothing reads, the flag that decides so, and the message about it."""

    name: str
    deciding: str
    changed: bool
    line: str


def _unread(config: Any) -> list[_Unread]:
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    flags = {
        flag_names(field)[0]: (field, getattr(section, field.name))
        for section in sections
        if dataclasses.is_dataclass(section)
        for field in dataclasses.fields(section)
    }
    found: list[_Unread] = []
    for name, (field, value) in flags.items():
        needs = needs_of(field)
        if needs is None or needs.met_by(flags[needs.flag][1]):
            continue
        line = name if isinstance(value, bool) else f"{name} {_text(value)}"
        if needs.values:
            line += (
                f" has no effect with {needs.flag} {_text(flags[needs.flag][1])}; it is read with "
                f"{', '.join(needs.values)}; remove it, or change {needs.flag}"
            )
        else:
            line += f" has no effect without {needs.flag}; add it, or remove the flag"
        found.append(_Unread(name, needs.flag, value != field.default, line))
    return found


def _text(value: object) -> str:
    """A value as it is typed; an empty list reads ``not given``."""
    return " ".join(value) or "not given" if isinstance(value, tuple) else str(value)
