"""Records the last collectives of this rank, whichever library calls them.

All of torch.distributed's functions end in a method of a process group, so these are wrapped, once
per process: calls of megatron-core, vLLM and ours are seen whatever name they imported. What vLLM
sums over shared memory, and collectives inside of captured graphs, are not.

Why: gloo has no flight recorder; NCCL's (``TORCH_FR_BUFFER_SIZE``) records on the device, and is
asked for what is not done there (:func:`device_lines`).
Upstream: torch/distributed/distributed_c10d.py.
Versions: torch 2.13.0.
Remove when: c10d records collectives of every backend.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.core.flights import Call, Position

KEPT = 64
"""Number of calls that are kept."""
SHOWN = 8
"""Number of calls that are shown of a rank."""

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "_allgather_base", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base",
    "alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
_MESSAGES = ("send", "recv")
# Frames of these files are not who called.
_LIBRARY = ("/torch/distributed/", "/torch/utils/")


class _Entry:
    """One call; ``waits`` while the rank is blocked until its end. ``work``: id of its handle."""

    __slots__ = (
        "code", "group", "line", "number", "operation", "peer", "shape", "since", "waits", "work"
    )  # fmt: skip

    def __init__(
        self, group: str, number: int, operation: str, shape: Any, peer: int, frame: Any
    ) -> None:
        self.group, self.number, self.operation = group, number, operation
        self.shape, self.peer = shape, peer
        self.code: CodeType = frame.f_code
        self.line: int = frame.f_lineno
        self.since = time.monotonic()
        self.waits = False
        self.work = 0


class FlightRecorder:
    """The last :data:`KEPT` collectives of this rank. Written by any thread, read by any other."""

    def __init__(self) -> None:
        self._ring: deque[_Entry] = deque(maxlen=KEPT)
        self._of_work: dict[int, _Entry] = {}
        self._numbers: dict[str, int] = {}
        self._last: dict[str, _Entry] = {}
        self._groups: dict[str, tuple[str, tuple[int, ...]]] = {}

    def began(self, group: Any, operation: str, args: tuple[Any, ...]) -> _Entry:
        """Note a call that begins."""
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = _described(group)
        message = operation in _MESSAGES
        number = 0
        if not message:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
        peer = args[1] if message and len(args) > 1 else -1
        entry = _Entry(name, number, operation, _shape(args), peer, _caller())
        if not message:
            self._last[name] = entry
        if len(self._ring) == KEPT:
            oldest = self._ring[0]
            if self._of_work.get(oldest.work) is oldest:
                self._of_work.pop(oldest.work, None)
        self._ring.append(entry)
        return entry

    def started(self, entry: _Entry, work: Any) -> None:
        """Note the handle of the call, so that a wait for it is known."""
        if work is not None:
            entry.work = id(work)
            self._of_work[entry.work] = entry

    def of_work(self, work: Any) -> _Entry | None:
        """Return the call of a handle that is waited for, and forget the handle."""
        return self._of_work.pop(id(work), None)

    def position(self) -> Position:
        """Return where this rank stands."""
        entries = list(self._ring)
        waiting = [entry for entry in entries if entry.waits]
        last = tuple(map(self._call, list(self._last.values())))
        return Position(dict(self._numbers), tuple(map(self._call, waiting or entries[-1:])), last)

    def recent(self) -> list[Call]:
        """Return the last :data:`SHOWN` calls, the oldest first."""
        return [self._call(entry) for entry in list(self._ring)[-SHOWN:]]

    def _call(self, entry: _Entry) -> Call:
        title, ranks = self._groups[entry.group]
        peer = ranks[entry.peer] if 0 <= entry.peer < len(ranks) else entry.peer
        shape = entry.shape
        if isinstance(shape, tuple):
            dtype, sizes = shape
            shape = f"{str(dtype).removeprefix('torch.')}{list(sizes)}"
        place = "/".join(entry.code.co_filename.split("/")[-2:])
        seconds = time.monotonic() - entry.since
        return Call(
            entry.group, title, ranks, entry.number, entry.operation, shape, peer,
            f"{place}:{entry.line}", entry.waits, round(seconds, 1),
        )  # fmt: skip


def device_lines() -> list[str]:
    """Return what PyTorch's flight recorder of NCCL says is not done on the device. Local.

    Empty without NCCL, and where ``TORCH_FR_BUFFER_SIZE`` (``TORCH_NCCL_TRACE_BUFFER_SIZE`` of
    older versions) is 0.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    try:
        entries = json.loads(dump(True, True)).get("entries") or []
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        # A rank that ends must end, whatever form a version of PyTorch gives to its record.
        return [f"  its record cannot be read: {type(error).__name__}: {error}"]
    open_ones = [entry for entry in entries if entry.get("state") != "completed"]
    lines = []
    for entry in open_ones[:SHOWN]:
        title = ", ".join(filter(None, map(str, entry.get("process_group", ()))))
        number = entry.get("collective_seq_id") or entry.get("p2p_seq_id")
        lines.append(
            f"  {entry.get('profiling_name')} no. {number} of {title}, "
            f"{entry.get('input_dtypes')} {entry.get('input_sizes')}: {entry.get('state')}"
        )
    more = len(open_ones) - SHOWN
    return lines + ([f"  and {more} more"] if more > 0 else [])


@functools.cache
def install() -> FlightRecorder:
    """Record all collectives of this process from now on. Idempotent."""
    recorder = FlightRecorder()
    group: Any = dist.ProcessGroup
    for name in (*_COLLECTIVES, *_MESSAGES):
        if (original := getattr(group, name, None)) is not None:
            setattr(group, name, _recorded(recorder, name, original))
    work: Any = dist.Work
    work.wait = _waited(recorder, work.wait)
    return recorder


def _recorded(
    recorder: FlightRecorder, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    operation = name.lstrip("_")

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = recorder.began(self, operation, args)
        entry.waits = True  # a call may itself block, as that of a barrier does
        try:
            work = original(self, *args, **kwargs)
        finally:
            entry.waits = False
        recorder.started(entry, work)
        return work

    return call


def _waited(recorder: FlightRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = recorder.of_work(self)
        if entry is None:
            return original(self, *args, **kwargs)
        entry.waits = True
        try:
            return original(self, *args, **kwargs)
        finally:
            entry.waits = False

    return wait


def _described(group: Any) -> tuple[str, tuple[int, ...]]:
    """Return title and global ranks of a group; a group that torch does not know has no ranks."""
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        ranks = ()
    title = "world" if group.group_desc == "default_pg" else group.group_desc.lower()
    return ("engine" if title == "undefined" else title), ranks


def _shape(args: tuple[Any, ...]) -> Any:
    """Return dtype and size of the first tensor among the arguments; without one a dash."""
    for one in args:
        while isinstance(one, list | tuple) and one:
            one = one[0]
        if isinstance(one, torch.Tensor):
            return one.dtype, one.shape
    return "no tensor"


def _caller() -> Any:
    """Return the frame of the code that called a function of torch.distributed."""
    frame: Any = sys._getframe(3)  # who called the wrapped method
    while frame.f_back is not None and _is_library(frame.f_code):
        frame = frame.f_back
    return frame


@functools.cache
def _is_library(code: CodeType) -> bool:
    return any(part in code.co_filename for part in _LIBRARY)
