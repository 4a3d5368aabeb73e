"""Bytes and speed of a weight sync, as metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet


@dataclass(frozen=True, slots=True)
class SyncTraffic:
    """The bytes that one rank moved in one sync, counted by the code that moved them.

    Attributes:
        received_bytes: Bytes from other ranks.
        sent_bytes: Bytes to other ranks.
        copied_bytes: Bytes from the rank's own trainer parameters.
    """

    received_bytes: int
    sent_bytes: int
    copied_bytes: int

    @property
    def written_bytes(self) -> int:
        """All bytes that arrived; with a relay also those that were forwarded."""
        return self.received_bytes + self.copied_bytes


def sync_metrics(traffic: Mapping[str, SyncTraffic], seconds: float) -> MetricSet:
    """Return one rank's metrics of a sync. Local.

    The names are the same on all ranks that have the same paths. Bytes are those of the busiest
    rank, the speed is the mean over ranks. The speed counts the busier direction, because links are
    full duplex.

    Args:
        traffic: Traffic by path (``direct``, ``stream``).
        seconds: Time that moving took on this rank, including the wait for its device.
    """
    received = sum(t.received_bytes for t in traffic.values())
    sent = sum(t.sent_bytes for t in traffic.values())
    written = sum(t.written_bytes for t in traffic.values())
    speed = [max(received, sent) / seconds / 1e9] if seconds > 0 else []
    return MetricSet(
        {
            "reshard/bytes_received": Max(float(received)),
            "reshard/bytes_sent": Max(float(sent)),
            "reshard/gb_per_s": Mean.of(speed),
            **{
                f"reshard/{path}_share": Mean(float(t.written_bytes), float(written))
                for path, t in traffic.items()
            },
        }
    )
