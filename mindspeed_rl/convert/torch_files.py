"""Files of ``torch.save``: places of their tensors, and files whose tensors are filled in later.

A pickle can name any function to be called, so nothing here calls what a file names, except for a
table of harmless types.

``torch.load`` and ``torch.save`` do the work. Tensors are loaded to the meta device, so only names
and places are read. A class that a file names and that is not known here becomes an inert
:class:`Unknown`, so that the arguments of a training run can be read without the libraries of that
run and without running its code. (``weights_only=True`` does the same, but only for pickle protocol
2; MindSpeed-LLM writes protocol 4.)
"""

from __future__ import annotations

import argparse
import collections
import errno
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import skip_data

from mindspeed_rl.convert.source import StoredTensor
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable


class Unknown:
    """A stand-in for a class that a pickle names and that a conversion does not need."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, value: object) -> None:
        """Ignore an element, where the class is a list."""

    def __setitem__(self, key: object, value: object) -> None:
        pass


_rebuild: Any = torch._utils  # The modules have no type annotations.
_native: Any = torch._C
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): _rebuild._rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): argparse.Namespace,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return tensors, element types and plain containers; all else is :class:`Unknown`."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name == "set" and module in ("builtins", "__builtin__"):
            return set
        return _KNOWN.get((module, name), Unknown)


class _Pickle:
    """The replacement of the module ``pickle`` for ``torch.load``."""

    Unpickler = _Unpickler

    @staticmethod
    def load(*args: object, **kwargs: object) -> None:
        """Refuse a file that is not an archive."""
        raise pickle.UnpicklingError("no zip archive")


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """Read the objects of a file of ``torch.save``, with tensors on the meta device.

    Args:
        path: Path of the file.
        start: Offset of the archive, in a file with several archives.
        length: Length of the archive; the whole file when not given.

    Raises:
        UsageError: There is no such archive, or it is truncated.
    """
    try:
        with path.open("rb") as file:
            archive: Any = file if length is None else _create_file_view(file, start, length)
            _refuse_program(archive)
            return torch.load(
                archive, map_location="meta", pickle_module=_Pickle, weights_only=False
            )
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a bad offset.
            raise UsageError(f"{path}: {why_unreadable(path, error)}") from error
        raise UsageError(
            f"{path}: truncated, or not written by torch.save ({error}); copy it again"
        ) from error


def saved_iteration(state: Any) -> int:
    """Return the number of training steps that a file's objects tell; 1 where they do not."""
    found = state.get("iteration") if isinstance(state, Mapping) else None
    return found if type(found) is int and found > 0 else 1


def _refuse_program(archive: Any) -> None:
    """Refuse an archive of TorchScript, which ``torch.load`` would execute.

    Raises:
        pickle.UnpicklingError: It is one.
    """
    start = archive.tell()
    is_zip = archive.read(2) == b"PK"
    archive.seek(start)
    if is_zip and "constants.pkl" in _native.PyTorchFileReader(archive).get_all_records():
        raise pickle.UnpicklingError("it is a program of TorchScript, not weights")
    archive.seek(start)


def stored_tensor(path: Path, tensor: torch.Tensor, start: int = 0) -> StoredTensor:
    """Locate the bytes of a tensor of :func:`read_torch_file`, which had the same ``start``.

    Raises:
        UsageError: The tensor is not stored in row-major order.
    """
    if not tensor.is_contiguous():
        raise UsageError(f"{path}: a tensor of shape {tuple(tensor.shape)} is not in row-major "
                         "order; save the checkpoint with contiguous tensors")  # fmt: skip
    storage: Any = tensor.untyped_storage()
    offset = start + storage._checkpoint_offset + tensor.storage_offset() * tensor.itemsize
    return StoredTensor(path, offset, tensor.dtype, tuple(tensor.shape))


def save_unfilled(
    file: IO[bytes],
    tensors: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    objects: Callable[[Sequence[torch.Tensor]], Any],
) -> None:
    """Run ``torch.save`` at the present position, with holes in place of the bytes of tensors.

    The checksums of the archive's records are those of the holes; ``torch.load`` ignores them.

    Args:
        file: File that is open for writing.
        tensors: Element type and shape of each tensor.
        objects: Function that makes the objects to save from tensors without data.

    Raises:
        OSError: The disk is full.
    """
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype) for dtype, shape in tensors]
    with skip_data(materialize_fake_tensors=True):
        torch.save(objects(fakes), file)


def saved_bytes(objects: Any) -> bytes:
    """Return a file of ``torch.save`` with small objects."""
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    return buffer.getvalue()
