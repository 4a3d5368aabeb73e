"""Plans a file of ``torch.save`` before any of its numbers exist.

Every record's place follows from sizes alone, so the numbers can be written in any order, by
several workers, and the same again after a kill. Checksums of the records, which the format has in
its headers, are written last.

Format: zip without compression, zip64 fields where a size or offset needs them; data begin at
multiples of 64 bytes, as torch's own writer does.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64
_ZIP64 = 0xFFFFFFFF
_FOLDER = "archive"
# the function that torch's own pickles name
_REBUILD: Any = torch.empty(0).__reduce_ex__(2)[0]  # type: ignore[no-untyped-call]
_STORAGES = {
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """Stands for a tensor in the objects of an archive; ``index`` numbers its storage."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its storage."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Storage:
    tensor: PlannedTensor


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, _Storage):
            return None
        tensor = item.tensor
        count = math.prod(tensor.shape)
        return ("storage", _STORAGES[tensor.dtype], str(tensor.index), "cpu", count)

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, PlannedTensor):
            return NotImplemented
        strides = tuple(math.prod(item.shape[dim + 1 :]) for dim in range(len(item.shape)))
        return _REBUILD, (_Storage(item), 0, item.shape, strides, False, OrderedDict())


@dataclass(frozen=True, slots=True)
class _Record:
    """A file of the archive.

    Attributes:
        name: with its folder.
        size: bytes of its data.
        start: of its local header, from the beginning of the archive.
        padding: bytes that align its data.
        data: what it holds; ``None`` for a storage.
    """

    name: bytes
    size: int
    start: int
    padding: int
    data: bytes | None

    @property
    def large(self) -> bool:
        return self.size >= _ZIP64

    @property
    def data_start(self) -> int:
        return self.start + 30 + len(self.name) + 20 * self.large + self.padding

    def local_header(self, crc: int) -> bytes:
        size = _ZIP64 if self.large else self.size
        extra = struct.pack("<2H2Q", 1, 16, self.size, self.size) if self.large else b""
        extra += struct.pack("<2H", 0x4246, self.padding - 4) + b"Z" * (self.padding - 4)
        fixed = (b"PK\x03\x04", 45 if self.large else 20, 0, 0, 0, 0, crc, size, size)
        return struct.pack("<4s5H3I2H", *fixed, len(self.name), len(extra)) + self.name + extra

    def central_header(self, crc: int) -> bytes:
        far = self.start >= _ZIP64
        wide = ([self.size, self.size] if self.large else []) + ([self.start] if far else [])
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, start = _ZIP64 if self.large else self.size, _ZIP64 if far else self.start
        version = 45 if wide else 20
        fixed = (b"PK\x01\x02", version, version, 0, 0, 0, 0, crc, size, size)
        tail = (len(self.name), len(extra), 0, 0, 0, 0, start)
        return struct.pack("<4s6H3I5H2I", *fixed, *tail) + self.name + extra


class TorchArchive:
    """A file of ``torch.save`` with given objects.

    Args:
        objects: plain containers; a :class:`PlannedTensor` where a tensor belongs, their indices
            counting from 0.
        tensors: all of them, by index.
    """

    def __init__(self, objects: Any, tensors: Sequence[PlannedTensor]) -> None:
        described = io.BytesIO()
        _Pickler(described, protocol=2).dump(objects)
        self._records: list[_Record] = []
        self._add("data.pkl", described.getvalue())
        self._add("byteorder", b"little")
        first = len(self._records)
        for tensor in tensors:
            self._add(f"data/{tensor.index}", None, tensor.num_bytes)
        self._storages = self._records[first:]
        self._add("version", b"3\n")
        self._directory = self._end()
        headers = b"".join(record.central_header(0) for record in self._records)
        #: bytes of the whole archive
        self.num_bytes = self._directory + len(headers) + len(self._tail(len(headers)))

    def offset_of(self, index: int) -> int:
        """First byte of a tensor, from the beginning of the archive."""
        return self._storages[index].data_start

    def frame(self, checksums: Sequence[int]) -> list[tuple[int, bytes]]:
        """Everything but the tensors: (offset, bytes).

        Args:
            checksums: CRC-32 of the bytes of each tensor, by index.
        """
        of_storage = iter(checksums)
        pieces, headers = [], b""
        for record in self._records:
            crc = next(of_storage) if record.data is None else zlib.crc32(record.data)
            pieces.append((record.start, record.local_header(crc) + (record.data or b"")))
            headers += record.central_header(crc)
        pieces.append((self._directory, headers + self._tail(len(headers))))
        return pieces

    def _end(self) -> int:
        last = self._records[-1] if self._records else None
        return last.data_start + last.size if last else 0

    def _add(self, name: str, data: bytes | None, size: int = 0) -> None:
        path = f"{_FOLDER}/{name}".encode()
        size = size if data is None else len(data)
        start = self._end()
        before = start + 30 + len(path) + (20 if size >= _ZIP64 else 0)
        padding = 4 + -(before + 4) % _ALIGNMENT
        self._records.append(_Record(path, size, start, padding, data))

    def _tail(self, length: int) -> bytes:
        """End of the directory, in both spellings."""
        count, start = len(self._records), self._directory
        end = start + length
        wide = struct.pack(
            "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start
        )
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
        small = struct.pack(
            "<4s4H2IH",
            b"PK\x05\x06",
            0,
            0,
            min(count, 0xFFFF),
            min(count, 0xFFFF),
            min(length, _ZIP64),
            min(start, _ZIP64),
            0,
        )
        return (wide if max(length, start) >= _ZIP64 or count >= 0xFFFF else b"") + small
