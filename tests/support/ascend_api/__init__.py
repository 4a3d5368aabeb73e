"""The committed snapshot of the interfaces that we use (``update.py`` writes it)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "ascend_api.json"


@cache
def snapshot() -> dict[str, Any]:
    """Do not change it; plant faults in a copy."""
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found
