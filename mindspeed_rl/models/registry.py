"""Which family serves which Hugging Face architecture: every module of ``models/families``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mindspeed_rl.models import families
from mindspeed_rl.models.config_values import checked_values
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec


@cache
def _families() -> tuple[tuple[WeightTable, Callable[[Mapping[str, Any]], ModelSpec]], ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return tuple((module.TABLE, module.spec_from_hf) for module in modules)


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed ``config.json`` of any known family.

    Raises:
        ValueError: unknown architecture, a missing key, a value of a wrong type, or a feature that
            is not computed.
    """
    config = checked_values(config)
    names = list(config.get("architectures") or [])
    for table, build in _families():
        if any(name in table.architectures for name in names):
            try:
                spec = build(config)
            except KeyError as error:
                raise ValueError(f"config.json lacks the key {error} of {names[0]}") from error
            if spec.rope_dim % 2:
                raise ValueError(
                    f"config.json: heads with {spec.rope_dim} rotated channels; rotary embeddings "
                    "turn pairs, so it must be even"
                )
            return spec
    known = sorted(name for table, _ in _families() for name in table.architectures)
    raise ValueError(f"config.json: architectures {names} are not supported; known: {known}")


def weight_table(family: str) -> WeightTable:
    """The weight table of a family."""
    for table, _ in _families():
        if table.family == family:
            return table
    raise LookupError(f"no weight table for family {family!r}")
