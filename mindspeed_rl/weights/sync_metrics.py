"""What a weight sync moved, as metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.metrics.metric_set import Max, Mean, MetricSet


@dataclass(frozen=True, slots=True)
class SyncTraffic:
    """What one rank moved in one sync, counted where it was moved.

    Attributes:
        received_bytes: from other ranks.
        sent_bytes: to other ranks.
        copied_bytes: from its own parameters of the trainer.
    """

    received_bytes: int
    sent_bytes: int
    copied_bytes: int

    @property
    def written_bytes(self) -> int:
        """All that arrived, with a relay also what was passed on."""
        return self.received_bytes + self.copied_bytes


def sync_metrics(traffic: Mapping[str, SyncTraffic], seconds: float) -> MetricSet:
    """One rank's metrics of a sync: the same names on all ranks that know the same paths. Local.

    Bytes are those of the busiest rank, the speed is the mean over ranks. Speed counts the busier
    direction: links are full duplex.

    Args:
        traffic: by path (``direct``, ``stream``).
        seconds: that moving took on this rank, its device waited for.
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
