"""Configs of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED = {
    path.stem: path for path in sorted((Path(__file__).parent / "hf_configs").glob("*.json"))
}


def published_config(model: str) -> dict[str, Any]:
    """The config of a model as if its weights were bfloat16."""
    config: dict[str, Any] = json.loads(PUBLISHED[model].read_text())
    config.pop("quantization_config", None)
    return config
