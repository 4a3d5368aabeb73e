"""Peak resident memory of this process between two points in time (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"  # proc(5): sets the high-water mark to the present resident size


class ProcFile:
    """A file of /proc that is read again and again: opened once. Of the process that opens it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read(self) -> bytes:
        """Its present content."""
        number, parts = self._file.fileno(), list[bytes]()
        while part := os.pread(number, 1 << 14, sum(map(len, parts))):
            parts.append(part)
        return b"".join(parts)


class PeakMemory:
    """Peak resident set size since the last ``restart``.

    The kernel keeps one high-water mark per process (VmHWM). Where it may be reset, the peaks are
    exact. Where not (a read-only /proc), the peak is exact when it exceeds every earlier one, and
    else at least the size at the two ends. Where there is no /proc (macOS) it is ``None``.
    """

    def __init__(self, status: Path = _STATUS, clear_refs: Path = _CLEAR_REFS) -> None:
        self._status = ProcFile(status) if status.exists() else None
        try:
            self._clear_refs = clear_refs.open("wb", buffering=0)
            self._can_reset = True
        except OSError:
            self._can_reset = False
        self._start = self._read()
        self.restart()

    def restart(self) -> None:
        """Begins a new interval."""
        if self._start is None:
            return
        if self._can_reset:
            try:
                os.pwrite(self._clear_refs.fileno(), _RESET_PEAK, 0)
                return
            except OSError:
                self._can_reset = False
        self._start = self._read()

    def peak_bytes(self) -> int | None:
        """The largest resident size of the present interval, in bytes."""
        now = self._read()
        if now is None or self._start is None:
            return None
        (start_rss, start_peak), (rss, peak) = self._start, now
        if self._can_reset or peak > start_peak:
            return peak
        return max(start_rss, rss)

    def _read(self) -> tuple[int, int] | None:
        """Resident size and its high-water mark, in bytes."""
        if self._status is None:
            return None
        text = self._status.read()
        return field_bytes(b"VmRSS:", text), field_bytes(b"VmHWM:", text)


def field_bytes(field: bytes, status: bytes) -> int:
    """A field of a status file of /proc, which is in kB."""
    return int(status.partition(field)[2].split(None, 1)[0]) * 1024
