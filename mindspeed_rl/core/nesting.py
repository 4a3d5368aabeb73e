"""How deep values of JSON may be nested: what walks through them later recurses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

DEEPEST = 64
"""Levels of lists and objects that are taken from a file or a client."""


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than :data:`DEEPEST` levels deep. Pure."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [x for one in level for x in _elements(one) if isinstance(x, dict | list)]
        if not level:
            return False
    return True


def _elements(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
