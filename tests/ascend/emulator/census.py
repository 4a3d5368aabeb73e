"""A record of the operators that ran on emulated devices, with the types of their tensors.

With the environment variable :data:`FOLDER` every process of a run writes what it meets for the
first time into a file of that folder; :func:`read` returns the record of all of them. Within a
process :func:`counting` counts.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = "MINDSPEED_RL_ASCEND_CENSUS"
_OURS = ("mindspeed_rl", "vllm_ascend", "vllm", "mindspeed", "megatron")


@dataclass(frozen=True, slots=True, order=True)
class Call:
    """An operator on a device.

    Attributes:
        operator: With its namespace; without overload, and without the underscore of those that
            write into their first argument.
        inputs: Types of its tensors on devices, in the order of its arguments.
        outputs: Types of the tensors that it returns.
        crosses: Whether a tensor is on the host, so that it is a transfer.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    crosses: bool


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _types(tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def _place() -> str:
    """The innermost function of a package that we know; the tests' own code otherwise."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _OURS:
            return f"{module}:{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "tests"


class Census:
    """The record of this process. It is empty and costs nothing until it is started."""

    def __init__(self) -> None:
        self.counts: Counter[Call] | None = None
        self._file: Any = None

    def start(self) -> None:
        """Start if the environment asks for a record. Idempotent."""
        folder = os.environ.get(FOLDER, "")
        if folder and self._file is None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # Ranks leave without Python's exit, so that every line is written at once.
            self._file = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)
            self.counts = Counter()

    def note(self, operator: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count a call whose arguments and results may be nested."""
        if self.counts is None:
            return
        given = list(_tensors([*args, *kwargs.values()]))
        returned = list(_tensors(result))
        devices = {tensor.device.type for tensor in (*given, *returned) if tensor.dim()}
        call = Call(
            operator.rstrip("_"),
            _types(tensor for tensor in given if tensor.device.type == "npu"),
            _types(returned),
            len(devices) > 1,
        )
        if call not in self.counts and self._file is not None:
            row = [call.operator, call.inputs, call.outputs, call.crosses, _place()]
            self._file.write(json.dumps(row) + "\n")
        self.counts[call] += 1


CENSUS = Census()


@contextmanager
def counting() -> Iterator[Counter[Call]]:
    """Count the calls of this process while the context is open."""
    before, CENSUS.counts = CENSUS.counts, Counter()
    try:
        yield CENSUS.counts
    finally:
        CENSUS.counts = before


def read(folder: Path) -> dict[Call, str]:
    """Return the calls of all processes that wrote into a folder, and where one of each was."""
    found: dict[Call, str] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            operator, inputs, outputs, crosses, place = json.loads(line)
            found.setdefault(Call(operator, tuple(inputs), tuple(outputs), crosses), place)
    return found
