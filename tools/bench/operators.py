"""Where the processor time of a traced stretch goes, by kind of operator.

Reads what ``torch.profiler`` exports as a Chrome trace. An operator's own time is its time less
that of the operators it calls.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OTHER = "other operators"
OUTSIDE = "outside operators"
# kind -> beginnings of the names, without their namespace
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "mv", "linear", "matmul"),
    "attention": ("_scaled_dot_product", "scaled_dot_product"),
    "exponentials": (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "exp", "log", "silu",
        "sigmoid",
    ),
    "copies": (
        "copy", "cat", "clone", "index", "_index", "gather", "scatter", "fill", "zero", "embedding",
        "masked_fill", "constant_pad", "slice_backward", "select_backward",
    ),
    "elementwise": (
        "mul", "add", "sub", "div", "neg", "pow", "rsqrt", "sqrt", "rsub", "where", "clamp", "lerp",
        "sum", "mean", "max", "norm", "linalg_vector_norm", "rms_norm", "_foreach",
    ),
    "optimizer": ("_fused_adam", "_fused_adamw"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of one thread: microseconds from the trace's zero."""

    name: str
    thread: tuple[Any, Any]
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The kind of an operator such as ``aten::addmm_``; the longest beginning, of whole words."""
    if name.startswith(("c10d::", "gloo:")):
        return "collectives"
    bare = name.rpartition("::")[2]
    fits = [
        (len(start), kind)
        for kind, starts in KINDS.items()
        for start in starts
        if bare == start or bare.startswith(start + "_")
    ]
    return max(fits)[1] if fits else OTHER


def read_ranges(trace: Path) -> tuple[list[Range], list[Range]]:
    """Operators and named ranges (``record_function``) of a Chrome trace."""
    operators: list[Range] = []
    named: list[Range] = []
    for event in json.loads(trace.read_text())["traceEvents"]:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind not in ("cpu_op", "user_annotation"):
            continue
        thread = (event["pid"], event["tid"])
        found = Range(event["name"], thread, event["ts"], event["ts"] + event["dur"])
        (operators if kind == "cpu_op" else named).append(found)
    return operators, named


def own_times(operators: Iterable[Range]) -> list[tuple[Range, float]]:
    """Every operator with its own microseconds."""
    threads: dict[tuple[Any, Any], list[Range]] = defaultdict(list)
    for operator in operators:
        threads[operator.thread].append(operator)
    result: list[tuple[Range, float]] = []
    for ranges in threads.values():
        open_ranges: list[list[Any]] = []  # operator, own time; the innermost last
        for operator in sorted(ranges, key=lambda r: (r.begin, -r.end)):
            while open_ranges and open_ranges[-1][0].end <= operator.begin:
                result.append(tuple(open_ranges.pop()))
            if open_ranges:
                open_ranges[-1][1] -= operator.end - operator.begin
            open_ranges.append([operator, operator.end - operator.begin])
        result.extend(tuple(entry) for entry in open_ranges)
    return result


def seconds_by_kind(trace: Path, stretch: str) -> dict[str, float]:
    """Own seconds of the operators that begin inside the ranges called ``stretch``, by kind.

    Operators of all threads count: the backward pass has one of its own. ``outside operators``
    is what is left of the ranges: Python, and waiting.

    Raises:
        ValueError: the trace has no range of that name.
    """
    operators, named = read_ranges(trace)
    stretches = [r for r in named if r.name == stretch]
    if not stretches:
        names = sorted({r.name for r in named})
        raise ValueError(f"{trace.name}: no range {stretch!r}; it has {names}")
    totals: dict[str, float] = defaultdict(float)
    for operator, own in own_times(operators):
        if any(r.begin <= operator.begin < r.end for r in stretches):
            totals[kind_of(operator.name)] += own
    totals[OUTSIDE] = sum(r.end - r.begin for r in stretches) - sum(totals.values())
    return {kind: totals[kind] / 1e6 for kind in sorted(totals, key=lambda kind: -totals[kind])}
