"""Steps of one rank in this process: every module has a gloo world of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.table_engine import single_rank


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with single_rank():
        yield
