"""Reads the rows of data sets; every row has its origin, so that an error can name it.

The ``datasets`` library does the reading, but for ``.jsonl`` and ``.json``: of a broken line it
gives no number, and it gives all rows of a file the same columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_rl.core.data_source import DataSource
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable
from mindspeed_rl.core.nesting import DEEPEST, is_too_deep
from mindspeed_rl.data.library import library_rows

_CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a data file.

    Attributes:
        where: File and line (or row number), for error messages.
        values: Values by column.
    """

    where: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """Return the value at ``key``, or ``None``; ``"a.b"`` also reaches into nested objects."""
        if key in self.values:
            return self.values[key]
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def text(self, key: str, option: str) -> str:
        """Return the value at ``key`` as a string that is not blank; numbers are converted.

        Args:
            key: Name of the column, with dots for nested objects.
            option: Flag that chose the column, for the error message.

        Raises:
            UsageError: the value is missing, empty, or neither a string nor a number.
        """
        value = self.get(key)
        # Some writers spell a missing number as NaN.
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
        if isinstance(value, str) and value.strip():
            return value
        raise UsageError(
            f"{self.where}: {option} {key!r} gives {value!r}, but a non-empty string or a number "
            f"is needed; the columns of this row are {sorted(self.values)}. Fix the row or set "
            f"{option} to the right column"
        )


def read_rows(source: str | Path | DataSource, flag: str = "data") -> Iterator[DataRow]:
    """Read the rows of a data set, one at a time but for ``.json``.

    ``.jsonl`` holds one JSON object per line (blank lines are skipped), ``.json`` one array of
    objects.

    Args:
        source: Name of the data set.
        flag: Flag that gave it, for messages.

    Raises:
        UsageError: there is no such data set or its kind is not known; while iterating, a line or
            row is broken, which the message names, or there are no rows.
    """
    if not isinstance(source, DataSource):
        source = DataSource.parse(str(source), flag)
    path = Path(source.place)
    _check_readable(path, f"{flag} {source.text}")
    reader = {".jsonl": _read_jsonl, ".json": _read_json}.get(path.suffix)
    if reader is not None and path.is_file() and not source.on_hub:
        return _at_least_one(source, flag, reader(path))
    return _at_least_one(source, flag, _read_library(source, flag))


def _check_readable(path: Path, where: str) -> None:
    try:
        if path.is_file():
            path.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"{where}: {why_unreadable(path, error)}; let this user read it, or give another one"
        ) from error


def in_chunks(rows: Iterable[DataRow]) -> Iterator[list[DataRow]]:
    """Return the rows in lists that are tokenised at once; the last list may be shorter."""
    rest = iter(rows)
    while chunk := list(islice(rest, _CHUNK_ROWS)):
        yield chunk


def _at_least_one(source: DataSource, flag: str, rows: Iterable[DataRow]) -> Iterator[DataRow]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UsageError(
            f"{flag} {source.text}: the data set has no rows; write it again, or give another one"
        )


def _read_jsonl(file: Path) -> Iterator[DataRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            yield _row(where, _parse_json(where, line))


def _read_json(file: Path) -> Iterator[DataRow]:
    values = _parse_json(str(file), file.read_bytes())
    if not isinstance(values, list):
        raise UsageError(
            f"{file}: expected one array of objects, got {type(values).__name__}; "
            "a file with one object per line must be named .jsonl"
        )
    for number, value in enumerate(values):
        yield _row(f"{file}, row {number} (counted from 0)", value)


def _read_library(source: DataSource, flag: str) -> Iterator[DataRow]:
    for number, values in enumerate(library_rows(source, flag)):
        yield DataRow(f"{source.text}, row {number} (counted from 0)", values)


def _parse_json(where: str, data: bytes) -> Any:
    try:
        # Given bytes, json would take a NUL for a sign of UTF-16 or UTF-32.
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: byte {error.start} is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error
    except RecursionError as error:
        raise _too_deep(where) from error
    except ValueError as error:
        hint = " It holds a NUL byte, so it may be no text." if b"\0" in data else ""
        raise UsageError(f"{where}: broken JSON: {error}.{hint} Correct or remove it") from error


def _row(where: str, value: Any) -> DataRow:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(value).__name__}")
    if is_too_deep(value):
        raise _too_deep(where)
    return DataRow(where, value)


def _too_deep(where: str) -> UsageError:
    return UsageError(
        f"{where}: lists and objects are nested more than {DEEPEST} levels deep; store deep "
        "values as text"
    )
