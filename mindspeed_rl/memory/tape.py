"""Memory of a forward and backward pass as a tape of steps, and the peaks of running it.

A step keeps bytes from its forward until its backward pass, and needs more while either runs. The
peak of a pass is found by running the tape, so that whatever order and recomputation give the
largest moment is found without a formula of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One part of a pass; bytes on one rank.

    Attributes:
        name: what it is, for tables.
        kept: from its forward until its backward pass.
        forward: besides, while its forward pass runs.
        backward: besides, while its backward pass runs: gradients.
        left: after its backward pass, until the step ends.
    """

    name: str
    kept: int
    forward: int = 0
    backward: int = 0
    left: int = 0


def kept_bytes(tape: Iterable[Step]) -> int:
    """What one forward pass leaves for its backward pass."""
    return sum(step.kept for step in tape)


def forward_peak(tape: Iterable[Step]) -> int:
    """The largest moment of a forward pass that keeps."""
    live = peak = 0
    for step in tape:
        live += step.kept
        peak = max(peak, live + step.forward)
    return peak


def backward_peak(tape: Sequence[Step]) -> int:
    """The largest moment of a backward pass, which starts with all that was kept."""
    live, peak = kept_bytes(tape), 0
    for step in reversed(tape):
        peak = max(peak, live + step.backward)
        live += step.left - step.kept
    return peak


def inference_peak(tape: Iterable[Step]) -> int:
    """The largest moment of a forward pass that keeps nothing."""
    return max((step.kept + step.forward for step in tape), default=0)


def recomputed(
    name: str,
    tape: Sequence[Step],
    input_bytes: int,
    gradient_bytes: int = 0,
    left_bytes: int = 0,
) -> Step:
    """A part whose input alone is kept, and which runs forward again before its backward pass.

    Args:
        name: of the step.
        tape: the part.
        input_bytes: what is kept.
        gradient_bytes: of its output, which waits while it runs forward again.
        left_bytes: what outlives its backward pass.
    """
    again = max(forward_peak(tape) + gradient_bytes, backward_peak(tape) + gradient_bytes)
    return Step(name, input_bytes, inference_peak(tape), again, left_bytes)
