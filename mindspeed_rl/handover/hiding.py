"""How much of the weight update could hide under the optimizer's step.

Parts of a weight update could move while the optimizer still steps later buckets. What that hides
is at most the shorter of both. The step reads and writes memory and computes next to nothing, so
that it takes its bytes over the bandwidth of the device's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

# GB/s of a device's memory, the vendors' numbers; of an A3 that of one die.
_MEMORY_GB_S = {"a3": 1600.0, "a2": 1600.0, "h100": 3350.0, "h200": 4800.0, "gpu24": 1008.0}
# GB/s of a rank that a weight update is assumed to receive, as in docs/resharding.md.
_ARRIVING_GB_S = 50.0
# Bytes per parameter: of optimizer state, and of what a step of AdamW reads and writes. These are
# the gradient in fp32 (4), parameter and both moments twice (24), and the copy in bf16 (2).
_BF16, _FP32 = (12, 30), (8, 28)


@dataclass(frozen=True, slots=True)
class Hiding:
    """Seconds of a rank that the optimizer's step and the weight update take at full speed.

    Attributes:
        step_seconds: Of the optimizer's arithmetic, at the bandwidth of the device's memory;
            ``None``: longer than the update, as its state comes from the host.
        update_seconds: Of the weight update, at 50 GB/s.
    """

    step_seconds: float | None
    update_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """The most seconds that an overlap of both could save."""
        step = self.update_seconds if self.step_seconds is None else self.step_seconds
        return min(step, self.update_seconds)

    def line(self, whole_seconds: float | None) -> str:
        """Return a sentence for the dry run.

        Args:
            whole_seconds: Predicted seconds of a step of the run; ``None``: not predicted.
        """
        share = f", {self.hidden_seconds / whole_seconds:.3%} of a step" if whole_seconds else ""
        step = "longer" if self.step_seconds is None else f"{1e3 * self.step_seconds:.1f} ms"
        return (
            f"at full speed the weight update takes {1e3 * self.update_seconds:.1f} ms (at "
            f"{_ARRIVING_GB_S:g} GB/s) and the last optimizer step {step}: if they overlapped, at "
            f"most {1e3 * self.hidden_seconds:.1f} ms would be saved{share}"
        )


def hiding(machine: str, *, optimizer_bytes: int, bf16: bool, sync_bytes: int) -> Hiding | None:
    """Return the seconds of step and update; ``None`` for machines of unknown speed. Pure.

    Args:
        machine: Value of ``--rl-dry-run-machine``.
        optimizer_bytes: Optimizer state of a rank on its device, both moments included; 0: it comes
            from the host.
        bf16: Whether parameters are in bf16, with fp32 copies in the optimizer.
        sync_bytes: Bytes that a rank receives in a weight update.
    """
    speed = _MEMORY_GB_S.get(machine)
    if speed is None or not sync_bytes:
        return None
    state, moved = _BF16 if bf16 else _FP32
    step = optimizer_bytes / state * moved / (speed * 1e9) if optimizer_bytes else None
    return Hiding(step, sync_bytes / (_ARRIVING_GB_S * 1e9))
