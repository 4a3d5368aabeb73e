"""A model that conversions start from; tests do not change it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conversions import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("deepseek", tmp_path_factory.mktemp("models") / "model")
