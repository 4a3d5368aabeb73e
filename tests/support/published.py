"""Configs of published models."""

from __future__ import annotations

import json
from typing import Any

from support.architecture import ROOT

PUBLISHED = {p.stem: p for p in sorted((ROOT / "pretrain_scripts/models/configs").glob("*.json"))}


def published_config(model: str) -> dict[str, Any]:
    """The config of a model as if its weights were bfloat16."""
    config: dict[str, Any] = json.loads(PUBLISHED[model].read_text())
    config.pop("quantization_config", None)
    return config
