"""Writes the JSON of a run, and reads its files with a record per line.

A record has its step, so that a resumed run can drop later ones. It is complete when its newline
is on disk; a tail without one, of a process that was killed, is dropped at the next write.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import atomic_path

logger = logging.getLogger(__name__)

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_WAITING = 10_000  # records that wait for room on a disk before the run ends

NONFINITE = "nonfinite"
"""Key of a record with the names of its numbers that are not finite."""


def encode_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Encode ``record`` as strict JSON, which has no NaN and no infinity.

    Such numbers become ``null`` and their dotted names are listed under ``"nonfinite"``, a key
    that is absent when all numbers are finite. NumPy scalars are written as plain numbers.

    Raises:
        TypeError: A value is not JSON: not a number, string, boolean, None, mapping or sequence.
    """
    nonfinite: list[str] = []
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain[NONFINITE] = nonfinite
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            if math.isfinite(value):
                return float(value)
            nonfinite.append(name)
            return None
        case Mapping():
            prefix = f"{name}." if name else ""
            return {str(k): _plain(v, f"{prefix}{k}", nonfinite) for k, v in value.items()}
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [_plain(v, f"{name}.{i}", nonfinite) for i, v in enumerate(value)]
    raise TypeError(f"{name or 'the record'} is a {type(value).__name__}, which JSON cannot hold")


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a file, in order; a missing file has none.

    Raises:
        UsageError: A complete line is not a JSON object with an integer ``"step"``.
    """
    for line_number, line in _complete_lines(Path(path)):
        yield _parse(line, Path(path), line_number)


class JsonlWriter:
    """Appends records to a file, each of which has left this process when ``append`` returns.

    The first append creates the folder and opens the file. Where the disk is full, records wait in
    memory, the file keeps whole lines, and a warning says so once; they are written when there is
    room again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: FileIO | None = None
        self._waiting: list[bytes] = []

    def append(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record, with ``"step"`` as its first key."""
        self._waiting.append(f"{encode_json({'step': step, **record})}\n".encode())
        try:
            self._write_waiting()
        except OSError as error:
            if error.errno not in FULL_DISK or len(self._waiting) > MOST_WAITING:
                raise self._named(error) from error
            if len(self._waiting) == 1:
                logger.warning(
                    "%s; its lines wait in memory until there is room", self._named(error)
                )

    def _write_waiting(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if _ends_within_a_line(self.path):
                self._rewrite(lambda record: True)  # all but the incomplete tail
            self._file = self.path.open("ab", buffering=0)
        while self._waiting:
            end = self._file.seek(0, os.SEEK_END)
            rest = self._waiting[0]
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(end)
                raise
            del self._waiting[0]

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))

    def truncate_after(self, step: int) -> None:
        """Drop the records of steps later than ``step``, which a resumed run writes again."""
        self.keep(lambda record: bool(record["step"] <= step))

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drop the records that are not ``wanted``, and an incomplete tail."""
        self.close()
        self._rewrite(wanted)

    def _rewrite(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        if not self.path.exists():
            return
        with atomic_path(self.path) as temporary, temporary.open("wb") as kept:
            for line_number, line in _complete_lines(self.path):
                if wanted(_parse(line, self.path, line_number)):
                    kept.write(line)

    def close(self) -> None:
        """Close the file; a later append opens it again.

        Raises:
            OSError: Records wait for room on the disk, and there still is none.
        """
        if self._waiting:
            try:
                self._write_waiting()
            except OSError as error:
                raise self._named(error) from error
        if self._file is not None:
            self._file.close()
            self._file = None


def _complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.exists():
        return
    # Read as bytes, because an incomplete tail may end within a character.
    with path.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield line_number, line


def _parse(line: bytes, path: Path, line_number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}, line {line_number}: not JSON ({error}); repair or remove the line"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UsageError(
            f'{path}, line {line_number}: expected a JSON object with an integer "step", '
            f"got {line[:80]!r}; repair or remove the line"
        )
    return record


def _ends_within_a_line(path: Path) -> bool:
    """Whether the last line of a file lacks its newline."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
