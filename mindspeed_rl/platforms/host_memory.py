"""Reads the resident memory of this process from files of /proc (Linux)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets the high-water mark to the present resident size


def reset_peak_bytes() -> None:
    """Start another interval of :func:`peak_bytes`; no effect where /proc is read-only."""
    with suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """Return the largest resident size since the last reset; 0 where there is no /proc."""
    return field_bytes(b"VmHWM:", _STATUS.read_bytes()) if _STATUS.exists() else 0


def field_bytes(field: bytes, status: bytes) -> int:
    """Return a field of a status file of /proc, which is in kB, as bytes."""
    return int(status.partition(field)[2].split(None, 1)[0]) * 1024
