"""Files of ``torch.save``: where their tensors lie, and files whose tensors are filled in later.

``torch.load`` and ``torch.save`` do the work. Tensors are loaded to the meta device, so only names
and places are read. A class that a file names and that is not known here becomes an inert
:class:`Unknown`, so that the arguments of a training run are read without the libraries of that run
and without running code. (``weights_only=True`` does the same for pickle protocol 2 alone;
MindSpeed-LLM writes protocol 4.)
"""

from __future__ import annotations

import argparse
import collections
import errno
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import skip_data

from mindspeed_rl.convert.source import StoredTensor
from mindspeed_rl.core.errors import UsageError


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


_rebuild: Any = torch._utils  # untyped in torch
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
        """Tensors, element types and plain containers."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name == "set" and module in ("builtins", "__builtin__"):
            return set
        return _KNOWN.get((module, name), Unknown)


class _Pickle:
    """What ``torch.load`` takes for the module ``pickle``."""

    Unpickler = _Unpickler

    @staticmethod
    def load(*args: object, **kwargs: object) -> None:
        """Asked where a file is no archive."""
        raise pickle.UnpicklingError("no zip archive")


def read_torch_file(path: Path, start: int = 0, length: int | None = None) -> Any:
    """The objects of a file of ``torch.save``, tensors on the meta device.

    Args:
        path: the file.
        start: where the archive begins, of a file with several.
        length: of the archive; the whole file when not given.

    Raises:
        UsageError: no such archive, or a truncated one.
    """
    try:
        with path.open("rb") as file:
            archive: Any = file if length is None else _create_file_view(file, start, length)
            return torch.load(
                archive, map_location="meta", pickle_module=_Pickle, weights_only=False
            )
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a seek before the start
            raise
        raise UsageError(
            f"{path}: truncated, or not written by torch.save ({error}); copy it again"
        ) from error


def stored_tensor(path: Path, tensor: torch.Tensor, start: int = 0) -> StoredTensor:
    """Where the bytes of a tensor of :func:`read_torch_file` are; ``start`` as given to it.

    Raises:
        UsageError: it is not stored in row-major order.
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
    """``torch.save`` at the present position, with holes where the bytes of tensors belong.

    The checksums of the archive's records are those of the holes; ``torch.load`` reads none.

    Args:
        file: open for writing.
        tensors: element type and shape of each.
        objects: makes what is saved of tensors without data.

    Raises:
        OSError: the disk is full.
    """
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype) for dtype, shape in tensors]
    with skip_data(materialize_fake_tensors=True):
        torch.save(objects(fakes), file)


def saved_bytes(objects: Any) -> bytes:
    """A file of ``torch.save`` of small objects."""
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    return buffer.getvalue()
