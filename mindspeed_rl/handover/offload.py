"""When the copies of the optimizer state to the host run: before the weight sync, or beside it.

Beside it, trainer and engine have their weights on the device while the optimizer state is still
there. The state leaves before the engine's cache is allocated in either case.
"""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
OFF, AUTO = "off", "auto"


@dataclass(frozen=True, slots=True)
class OffloadOrder:
    """Whether the optimizer state is copied to the host beside the weight sync, and why."""

    beside_sync: bool
    why: str

    def line(self) -> str:
        """Return a sentence for the dry run and the start of a run."""
        place = "beside" if self.beside_sync else "before"
        return f"optimizer state goes to the host {place} the weight update: {self.why}"


def order_of_offload(
    asked: str, *, leaves: bool, on_host: bool, sync_bytes: int, usable_bytes: int
) -> OffloadOrder | None:
    """Decide the order. Pure; equal on all ranks if the numbers are.

    Args:
        asked: ``--rl-offload-overlap``, ``"auto"`` or ``"off"``.
        leaves: Whether the optimizer state leaves the device at all.
        on_host: Whether the device is the host, where a copy is done when its call returns.
        sync_bytes: Largest bytes of a rank during the sync with the optimizer state there.
        usable_bytes: Bytes of a device that predictions may fill.

    Returns:
        The order; ``None`` where the optimizer state stays.
    """
    if not leaves:
        return None
    if asked == OFF:
        return OffloadOrder(False, "as --rl-offload-overlap says")
    if on_host:
        return OffloadOrder(False, "copies on a host are done when they return")
    fits = sync_bytes <= usable_bytes
    need = f"{sync_bytes / _GIB:.3g} GiB with it there, {usable_bytes / _GIB:.3g} GiB may be used"
    return OffloadOrder(fits, need)
