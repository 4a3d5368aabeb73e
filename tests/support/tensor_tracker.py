"""Bytes of live tensors and their peak, on devices whose allocator keeps no statistics.

Every operator that runs inside the tracker shows its results to it; a storage counts from the
first operator that returned it until it is freed. Scratch memory inside an operator is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is entered; what exists before is not counted.

    Local to this thread and to the backward passes that it starts. Operators take several times
    as long: for tests, and for steps that are measured on purpose.

    Attributes:
        live_bytes: of storages that were made inside and still exist.
        peak_bytes: the largest ``live_bytes`` since the start or :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        # id of a storage -> the reference that reports its end, and its size; the Python object of
        # a storage lives as long as its memory, so the id is not reused before
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._outside: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count what it returns."""
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note_argument(leaf)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self.peak_bytes = self.live_bytes

    def _note_argument(self, tensor: torch.Tensor) -> None:
        """What an operator is given and none returned was made outside."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._known and key not in self._outside:
            self._outside[key] = weakref.ref(storage, self._forgetter(key))

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._outside:
            return
        size = storage.nbytes()
        reference, before = self._known.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, self._forgetter(key))
        self._known[key] = (reference, size)
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forgetter(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._outside.pop(key, None)
            self.live_bytes -= self._known.pop(key, (None, 0))[1]

        return forget
