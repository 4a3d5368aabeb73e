"""Tests of the NPU path on the emulator; they run in an environment of their own (``run.sh``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

EMULATED = "MINDSPEED_RL_ASCEND_EMULATOR" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the emulator's environment every test here is skipped, with what to do."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.ascend_emul)
        if not EMULATED:
            item.add_marker(
                pytest.mark.skip(reason="no emulated CANN in this process: run tests/ascend/run.sh")
            )
