"""Headers of safetensors files: names, types and shapes without reading a weight."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A tensor of a safetensors file: element type in the format's spelling, shape, first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def safetensors_entries(path: Path) -> dict[str, StoredEntry]:
    """Read the header of one safetensors file.

    Raises:
        UsageError: The file is not a safetensors file, or its data ends too early.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise UsageError(f"a header of {length} bytes does not fit")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            if not all(map(_is_entry, header.values())):
                raise TypeError("a shape or a place that is none")
            ends = [entry["data_offsets"][1] for entry in header.values()]
            first = 8 + length
            entries = {
                name: StoredEntry(
                    entry["dtype"], tuple(entry["shape"]), first + entry["data_offsets"][0]
                )
                for name, entry in header.items()
            }
            end = first + max(ends, default=0)
    except (ValueError, struct.error) as error:
        raise UsageError(f"{path}: unreadable safetensors file: {error}") from error
    except (AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: its header is not that of a safetensors file") from error
    if end != path.stat().st_size:
        raise UsageError(f"{path}: {path.stat().st_size} bytes, its header implies {end}")
    return entries


def _is_entry(entry: dict[str, Any]) -> bool:
    """Whether an entry of a header has a type, a shape and a place."""
    begin, end = entry["data_offsets"]
    numbers = [*entry["shape"], begin, end - begin]
    return type(entry["dtype"]) is str and all(type(n) is int and n >= 0 for n in numbers)
