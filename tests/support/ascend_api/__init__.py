"""What our code uses of packages that no CPU installation has, and a snapshot of those.

``ascend_api.json`` has, by package and version, the parameters of every function that we use, and
``null`` for what has none or whose parameters its sources do not tell. ``update.py`` writes it.
"""

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
