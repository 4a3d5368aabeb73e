"""Planning and generating pause the collector of cycles, and only for themselves."""

from __future__ import annotations

import gc
import weakref

import pytest

from mindspeed_rl.core.garbage import collection_afterwards, without_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_paused_and_then_as_before(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="does not fit"), without_collection():
            assert not gc.isenabled()
            raise ValueError("does not fit")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_collected_at_the_end_and_not_before(enabled: bool) -> None:
    """Also of objects that would have started the collector; one that was off stays off."""
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collection_afterwards():
            lost = weakref.ref(Node())
            kept = [[i] for i in range(5 * gc.get_threshold()[0])]
            assert lost() is not None and kept
        assert gc.isenabled() is enabled and (lost() is None) is enabled
    finally:
        (gc.enable if was else gc.disable)()
