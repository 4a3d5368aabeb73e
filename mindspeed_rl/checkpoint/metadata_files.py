"""Reads the metadata of a checkpoint in megatron-core's distributed format without trusting it.

megatron-core and torch unpickle the index of tensors (``.metadata``) with everything that it names,
so a file of a stranger could run any code. Here only the classes of such an index are taken.
"""

from __future__ import annotations

import argparse
import json
import pickle
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

INDEX, COMMON, FORMAT_FILE = ".metadata", "common.pt", "metadata.json"
_FORMAT_KEYS = {
    *("sharded_backend", "sharded_backend_version"),
    *("common_backend", "common_backend_version"),
}
_CLASSES = "torch.distributed.checkpoint."
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return element types, sizes, and torch's plain classes of an index.

        Raises:
            pickle.UnpicklingError: The file names something else.
        """
        if (module, name) in _NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith(_CLASSES) and "." not in name:
            found = super().find_class(module, name)
            plain = is_dataclass(found) or (isinstance(found, type) and issubclass(found, Enum))
            if plain and found.__module__.startswith(_CLASSES):
                return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no index of tensors needs and which could run code"
        )


def read_index(path: Path) -> Any:
    """Read an index of tensors (``torch.distributed.checkpoint.metadata.Metadata``). Local.

    Raises:
        ValueError: The file is damaged, or names something that does not belong into an index.
        FileNotFoundError: There is no such file.
    """
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle may end in any
        raise ValueError(f"{path.name} is no index of tensors ({error})") from error
    for part in ("state_dict_metadata", "storage_data"):
        if not isinstance(getattr(index, part, None), dict):
            raise ValueError(f"{path.name} is no index of tensors (without {part})")
    for place in index.storage_data.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{path.name} names {name!r}, which is no file of its folder")
    if not all(map(_is_entry, index.state_dict_metadata.items())):
        raise ValueError(f"{path.name} describes tensors without a shape")
    if not all(map(_is_place, index.storage_data.items())):
        raise ValueError(f"{path.name} has tensors without a place in a file")
    return index


def _is_entry(entry: tuple[object, Any]) -> bool:
    """Whether an entry is a name and what is stored: a tensor and its chunks, or other bytes."""
    key, stored = entry
    if not isinstance(stored, TensorStorageMetadata):
        return isinstance(key, str)
    sizes = [getattr(stored, "size", None)]
    chunks = getattr(stored, "chunks", None)
    if not isinstance(key, str) or not isinstance(chunks, list):
        return False
    sizes += [getattr(chunk, name, None) for chunk in chunks for name in ("offsets", "sizes")]
    return all(isinstance(size, torch.Size) and len(size) == len(sizes[0] or ()) for size in sizes)


def _is_place(entry: tuple[Any, Any]) -> bool:
    """Whether an entry is the name of a chunk, and where its bytes are."""
    index, place = entry
    offset = getattr(index, "offset", "")
    numbers = [getattr(place, name, None) for name in ("offset", "length")]
    is_name = isinstance(getattr(index, "fqn", None), str)
    is_offset = offset is None or isinstance(offset, torch.Size)
    return is_name and is_offset and all(type(n) is int and n >= 0 for n in numbers)


def problem_of_metadata(folder: Path) -> str:
    """Describe what is wrong with the metadata of a folder of tensors; empty: nothing. Local.

    What the index says is in the tensor files is not read.
    """
    try:
        kind = json.loads((folder / FORMAT_FILE).read_text(encoding="utf-8"))
        if not isinstance(kind, dict) or not set(kind) <= _FORMAT_KEYS or not kind:
            return f"{FORMAT_FILE} is no description of a format"
        if kind.get("sharded_backend") != "torch_dist":
            return f"{FORMAT_FILE} names the format {kind.get('sharded_backend')!r}"
        index = read_index(folder / INDEX)
        with known_arguments(folder):
            torch.load(folder / COMMON, map_location="cpu", weights_only=True)
        files = {str(info.relative_path) for info in index.storage_data.values()}
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except Exception as error:  # a damaged file may end in any
        return f"metadata cannot be read: {error}".partition("\n")[0]
    lost = sorted(name for name in files if not (folder / name).is_file())
    return f"{lost[0]}, which {INDEX} names, is missing" if lost else ""


def known_arguments(folder: Path) -> AbstractContextManager[None]:
    """Let ``torch.load`` build, in this block, a run's arguments as Megatron-LM saves them. Local.

    These are plain values by their names. Where Megatron's own classes are named, such as those of
    its enumerations, what they are made of takes their place, and none of them is called.
    """
    named = torch.serialization.get_unsafe_globals_in_checkpoint(folder / COMMON)
    inert = [(_value, name) for name in named if name.startswith("megatron.")]
    return torch.serialization.safe_globals([argparse.Namespace, SimpleNamespace, *inert])


def _value(*values: object) -> tuple[object, ...]:
    return values


def has_arguments(folder: Path) -> bool:
    """Whether a folder has arguments of a run, as Megatron-LM and MindSpeed-LLM save them. Local.

    Nothing is unpickled: the file names the class of arguments or does not.
    """
    if any(folder.glob("mp_rank_*")):
        return True
    try:
        return b"argparse" in (folder / COMMON).read_bytes()
    except OSError:
        return False
