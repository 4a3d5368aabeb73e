"""What a sync moved, in the metrics of the step."""

from __future__ import annotations

import math

import pytest

from mindspeed_rl.metrics.metric_set import reduce_metrics
from mindspeed_rl.weights.sync import sync_metrics
from mindspeed_rl.weights.traffic import RankTraffic

GB = 10**9


def moved(received: int, sent: int, copied: int) -> RankTraffic:
    return RankTraffic(0, received, sent, copied, 0, 0, 1)


def test_the_busier_direction_sets_the_speed() -> None:
    metrics = sync_metrics("direct", moved(3 * GB, 8 * GB, GB), 2.0)
    assert reduce_metrics(metrics) == {
        "reshard/bytes_received": 3.0 * GB,
        "reshard/bytes_sent": 8.0 * GB,
        "reshard/direct_share": 1.0,
        "reshard/gb_per_s": 4.0,
    }


def test_bytes_are_those_of_the_busiest_rank() -> None:
    first = sync_metrics("stream", moved(2, 6, 2), 1.0)
    second = sync_metrics("stream", moved(8, 3, 0), 1.0)
    found = reduce_metrics(first.merge(second))
    assert (found["reshard/bytes_received"], found["reshard/bytes_sent"]) == (8.0, 6.0)
    assert found["reshard/gb_per_s"] == pytest.approx((6 + 8) / 2 / GB)
    assert found["reshard/stream_share"] == 1.0


def test_a_rank_that_moved_nothing_has_no_say() -> None:
    nothing = sync_metrics("direct", moved(0, 0, 0), 0.0)
    assert math.isnan(reduce_metrics(nothing)["reshard/gb_per_s"])
    other = sync_metrics("direct", moved(4, 2, 0), 1.0)
    assert reduce_metrics(nothing.merge(other))["reshard/direct_share"] == 1.0
