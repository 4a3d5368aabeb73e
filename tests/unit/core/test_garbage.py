"""Planning pauses the collector of cycles, and only for itself."""

from __future__ import annotations

import gc

import pytest

from mindspeed_rl.core.garbage import without_collection


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
