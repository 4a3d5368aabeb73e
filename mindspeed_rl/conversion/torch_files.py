"""Files of ``torch.save``: what is in them and where, without running code that they name.

Such a file is a zip archive without compression: a pickle that describes the objects, and the bytes
of every storage in a record of its own. Any class that the pickle names and that is not known here
becomes an inert :class:`Unknown`, so that the arguments of a training run can be read without the
libraries of that run.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from mindspeed_rl.conversion.stored import StoredTensor

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}


class Unknown:
    """Something that a pickle names and that is of no use to a conversion."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        """As of a list."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


class Section(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Position within the part."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move within the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """At most what is left of the part."""
        self._file.seek(self._start + self._position)
        wanted = min(len(buffer), self._length - self._position)
        data = self._file.read(max(0, wanted))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Unpickler(pickle.Unpickler):
    """Builds plain containers, :class:`StoredTensor` and :class:`Unknown`; runs nothing else."""

    def __init__(self, data: bytes, path: Path, records: dict[str, int]) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._records = path, records

    def persistent_load(self, pid: Any) -> StoredTensor:
        """A storage: ``("storage", type, record, device, number of elements)``."""
        _, kind, key, _, count = pid
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{self._path}: storages of type {kind} are not supported")
        return StoredTensor(self._path, self._records[str(key)], kind, (int(count),))

    def find_class(self, module: str, name: str) -> Any:
        """The few names that describe tensors and containers."""
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _DTYPES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _KNOWN.get((module, name), Unknown)


def _rebuild_tensor(
    storage: StoredTensor, offset: int, size: Any, stride: Any, *unused: object
) -> StoredTensor | Unknown:
    shape = tuple(int(n) for n in size)
    dense, step = [], 1
    for n in reversed(shape):
        dense.append(step)
        step *= n
    strides = tuple(int(n) for n in stride)
    fits = all(s == d or n == 1 for s, d, n in zip(strides, reversed(dense), shape, strict=True))
    if not fits:  # nothing that a layout holds is stored so
        return Unknown()
    start = storage.offset + int(offset) * storage.dtype.itemsize
    return StoredTensor(storage.path, start, storage.dtype, shape)


def _rebuild_parameter(data: StoredTensor, *unused: object) -> StoredTensor:
    return data


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): argparse.Namespace,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("torch", "Size"): tuple,
}


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The objects of a file of ``torch.save``, tensors as :class:`StoredTensor`.

    Args:
        path: the file.
        start: where the archive begins, of a file with several.
        length: of the archive; the rest of the file when not given.

    Raises:
        ValueError: no such archive, or a truncated one.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - start if length is None else length
            with zipfile.ZipFile(io.BufferedReader(Section(file, start, size))) as archive:
                entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
                data = archive.read(entries["data.pkl"])
                order = entries.get("byteorder")
                if order is not None and archive.read(order) != b"little":
                    raise ValueError("numbers are in big-endian order")
            records = {
                name.removeprefix("data/"): start + _data_offset(file, start, info)
                for name, info in entries.items()
                if name.startswith("data/")
            }
        return _Unpickler(data, path, records).load()
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError, struct.error) as error:
        raise ValueError(
            f"{path}: truncated, or not written by torch.save ({error}); copy it again"
        ) from error


def _data_offset(file: IO[bytes], start: int, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a record begin, behind its local header."""
    file.seek(start + info.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return info.header_offset + _LOCAL_HEADER.size + int(header[-2]) + int(header[-1])
