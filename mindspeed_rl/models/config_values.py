"""Reader of single values of a Hugging Face ``config.json``, which checks their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from mindspeed_rl.core.errors import UsageError

_T = TypeVar("_T", int, float, bool, str, list[Any], dict[str, Any])
_NEEDED: Mapping[type[Any], str] = {
    int: "a whole number, 0 or more",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


def read(config: Mapping[str, Any], kind: type[_T], *keys: str, default: _T | None = None) -> _T:
    """The value of the first of ``keys`` that is set; a null means the same as no key.

    Args:
        config: Parsed ``config.json``, or an object in it.
        kind: Type of the value.
        keys: Names of the value; transformers renamed some keys.
        default: Value where no key is set; ``None``: a key has to be there.

    Raises:
        KeyError: No key is set and there is no default.
        UsageError: The value is of another type, a negative size, or not finite.
    """
    for key in keys:
        if (found := config.get(key)) is not None:
            if not _is_a(found, kind):
                raise UsageError(f"config.json: {key} {found!r}: must be {_NEEDED[kind]}")
            return kind(found)
    if default is None:
        raise KeyError(keys[0])
    return default


def _is_a(value: object, kind: type[Any]) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return type(value) is kind and (kind is not int or value >= 0)  # type: ignore[operator]
