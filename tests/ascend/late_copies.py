"""Copies from a device to the host that are done late, as those of a real one may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GARBAGE = float("nan")
_COPY = torch.ops.aten.copy_.default


class _Late(TorchDispatchMode):
    """Keeps asynchronous copies to the host for later; until then their targets hold garbage.

    What is copied is what the source held when the copy was queued: streams keep that order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _COPY:
            target, source = args[:2]
            late = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
            if late and target.device.type == "cpu" and source.device.type == "npu":
                self.queued.append((target, source.detach().cpu()))
                return target.fill_(GARBAGE if target.is_floating_point() else 0x6B)
        return func(*args, **kwargs)

    def do(self) -> None:
        """Do what is queued."""
        queued, self.queued = self.queued, []
        for target, source in queued:
            target.copy_(source)
        self.num_done += len(queued)


@contextmanager
def late_copies() -> Iterator[_Late]:
    """Within, asynchronous copies to the host are done when something waits for a stream."""
    npu: Any = torch.npu  # torch_npu adds it
    late = _Late()

    def after_copies(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            late.do()
            return original(*args, **options)

        return wait

    waits = [(npu, "synchronize"), (npu.Stream, "synchronize"), (npu.Stream, "wait_stream")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in waits]
    for owner, name, original in originals:
        setattr(owner, name, after_copies(original))
    try:
        with late:
            yield late
            late.do()
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
