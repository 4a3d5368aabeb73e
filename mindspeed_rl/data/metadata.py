"""Metadata of rows as JSON and back, with the values of Arrow that JSON has no form for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from mindspeed_rl.core.errors import UsageError

_TAG = "__type__"
# Name -> type, its form in JSON, and back. A datetime is a date as well, so it comes first.
_FORMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: timedelta(*parts),
    ),
    "Decimal": (Decimal, str, Decimal),
}


def metadata_to_json(metadata: Mapping[str, Any], where: str) -> bytes:
    """Return the metadata of a row as ASCII text.

    Args:
        metadata: Plain values, and those that Arrow adds to them: bytes, times, decimals.
        where: Row, for messages.

    Raises:
        UsageError: a value is of another type.
    """

    def form(value: Any) -> dict[str, Any]:
        for name, (kind, to_json, _) in _FORMS.items():
            if isinstance(value, kind):
                return {_TAG: name, "value": to_json(value)}
        raise UsageError(
            f"{where}: the metadata holds a {type(value).__name__}; allowed are text, numbers, "
            f"lists, objects, {', '.join(_FORMS)}: remove or change that column"
        )

    return json.dumps(metadata, default=form).encode()


def metadata_from_json(text: bytes) -> dict[str, Any]:
    """Return what :func:`metadata_to_json` was given."""
    found: dict[str, Any] = json.loads(text, object_hook=_value)
    return found


def _value(found: dict[str, Any]) -> Any:
    if set(found) == {_TAG, "value"} and found[_TAG] in _FORMS:
        return _FORMS[found[_TAG]][2](found["value"])
    return found
