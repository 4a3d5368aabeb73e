"""Which parameters of a test are in the first tier, the tests that run at every commit."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test of which all but ``quick`` are in the second tier."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
