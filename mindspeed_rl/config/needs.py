"""Checks of flags that are read only with a certain value of another flag."""

from __future__ import annotations

import dataclasses
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
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    flags = {
        flag_names(field)[0]: (field, getattr(section, field.name))
        for section in sections
        if dataclasses.is_dataclass(section)
        for field in dataclasses.fields(section)
    }
    found: list[str] = []
    for name, (field, value) in flags.items():
        needs = needs_of(field)
        if value == field.default or needs is None or needs.met_by(flags[needs.flag][1]):
            continue
        typed = name if isinstance(value, bool) else f"{name} {_text(value)}"
        if not needs.values:
            found.append(f"{typed} has no effect without {needs.flag}; add it, or remove the flag")
            continue
        found.append(
            f"{typed} has no effect with {needs.flag} {_text(flags[needs.flag][1])}; it is read "
            f"with {', '.join(needs.values)}; remove it, or change {needs.flag}"
        )
    refuse(found)


def _text(value: object) -> str:
    """A value as it is typed; an empty list reads ``not given``."""
    return " ".join(value) or "not given" if isinstance(value, tuple) else str(value)
