"""Reads the rows of local data files: ``.jsonl``, ``.json`` and ``.parquet``.

It uses no hub and no cache folder, and writes nothing to disk. Every row has its origin, so that
checks in other modules can name the line at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError

_SUFFIXES = (".jsonl", ".json", ".parquet")
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


def read_rows(path: str | Path) -> Iterator[DataRow]:
    """Read the rows of a data file, one at a time for ``.jsonl`` and ``.parquet``.

    ``.jsonl`` holds one JSON object per line (blank lines are skipped), ``.json`` one array of
    objects.

    Raises:
        UsageError: there is no such file or its suffix is not known; while iterating, a line or row
            is broken, which the message names, or the file has no rows.
    """
    file = Path(path)
    if file.suffix not in _SUFFIXES:
        raise UsageError(f"data file {str(file)!r} must end in one of {', '.join(_SUFFIXES)}")
    if not file.is_file():
        raise UsageError(f"data file {str(file)!r} does not exist or is not a file")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    return _at_least_one(file, readers[file.suffix](file))


def in_chunks(rows: Iterable[DataRow]) -> Iterator[list[DataRow]]:
    """Return the rows in lists that are tokenised at once; the last list may be shorter."""
    rest = iter(rows)
    while chunk := list(islice(rest, _CHUNK_ROWS)):
        yield chunk


def _at_least_one(file: Path, rows: Iterable[DataRow]) -> Iterator[DataRow]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UsageError(f"{file}: the file has no rows; write it again, or give another one")


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


def _read_parquet(file: Path) -> Iterator[DataRow]:
    # pyarrow, which `datasets` is built on, reads the file in place; `datasets` would first write
    # an Arrow copy of it into a cache folder, on every rank.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    yield _row(f"{file}, row {number} (counted from 0)", value)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a damaged page or footer
        raise UsageError(f"{file}: not a readable parquet file: {error}") from error


def _parse_json(where: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:  # also raised by bytes that are not UTF-8
        raise UsageError(f"{where}: broken JSON: {error}") from error


def _row(where: str, value: Any) -> DataRow:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return DataRow(where, value)
