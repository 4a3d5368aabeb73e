"""Bounds of overlaps around the weight update, and the order of the offload."""

from __future__ import annotations

import pytest

from mindspeed_rl.handover.hiding import hiding
from mindspeed_rl.handover.offload import order_of_offload

GB = 10**9


def test_the_step_is_bound_by_memory_and_hides_no_more_than_the_shorter() -> None:
    """1e9 parameters of a rank: 12 GB of state and 30 GB read and written, at 3350 GB/s."""
    found = hiding("h100", optimizer_bytes=12 * GB, bf16=True, sync_bytes=5 * GB)
    assert found is not None and found.step_seconds == pytest.approx(30 / 3350)
    assert found.update_seconds == pytest.approx(0.1)
    assert found.hidden_seconds == found.step_seconds
    assert "0.090% of a step" in found.line(10.0) and "of a step" not in found.line(None)
    short = hiding("h100", optimizer_bytes=12 * GB, bf16=True, sync_bytes=GB // 10)
    assert short is not None and short.hidden_seconds == pytest.approx(0.002)
    single = hiding("h100", optimizer_bytes=8 * GB, bf16=False, sync_bytes=5 * GB)
    assert single is not None and single.step_seconds == pytest.approx(28 / 3350)


def test_a_step_from_the_host_could_hide_the_whole_update() -> None:
    found = hiding("a3", optimizer_bytes=0, bf16=True, sync_bytes=5 * GB)
    assert found is not None and found.step_seconds is None
    assert found.hidden_seconds == found.update_seconds == pytest.approx(0.1)
    assert "longer" in found.line(100.0) and "0.100% of a step" in found.line(100.0)


def test_nothing_is_said_of_machines_of_unknown_speed_or_engines_that_lack_nothing() -> None:
    assert hiding("cpu", optimizer_bytes=GB, bf16=True, sync_bytes=GB) is None
    assert hiding("a3", optimizer_bytes=GB, bf16=True, sync_bytes=0) is None


@pytest.mark.parametrize(
    ("asked", "on_host", "need", "beside"),
    [
        ("auto", False, 10, True),
        ("auto", False, 11, False),
        ("auto", True, 1, False),
        ("off", False, 1, False),
    ],
)
def test_the_state_leaves_beside_the_update_where_there_is_room(
    asked: str, on_host: bool, need: int, beside: bool
) -> None:
    order = order_of_offload(asked, leaves=True, on_host=on_host, sync_bytes=need, usable_bytes=10)
    assert order is not None and order.beside_sync is beside
    assert ("beside" if beside else "before") in order.line()


def test_there_is_no_order_for_what_stays() -> None:
    order = order_of_offload("auto", leaves=False, on_host=False, sync_bytes=1, usable_bytes=10)
    assert order is None
