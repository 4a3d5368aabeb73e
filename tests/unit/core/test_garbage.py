"""Planning pauses the collector of cycles, and only for itself."""

from __future__ import annotations

import gc

import pytest

from mindspeed_rl.core.garbage import without_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_paused_and_then_as_before(enabled: bool) -> None:
    seen: list[bool] = []

    @without_collection
    def plan(number: int, *, fails: bool = False) -> int:
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("does not fit")
        return number

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert plan(3) == 3 and gc.isenabled() is enabled
        with pytest.raises(ValueError, match="does not fit"):
            plan(3, fails=True)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False, False]
