"""The result of a run in one JSON file, for scripts and reports to read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.metrics.jsonl import encode_json


def write_summary(path: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Replaces ``path`` by ``summary`` as indented JSON; a reader never sees a part of it.

    NaN and infinity become null and are listed under ``"nonfinite"`` (see ``encode_json``).
    """
    write_text_atomic(path, encode_json(summary, indent=2) + "\n")
