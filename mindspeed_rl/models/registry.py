"""Look-up of the family of a Hugging Face architecture among the modules of ``models/families``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models import families
from mindspeed_rl.models.config_values import read
from mindspeed_rl.models.rules import WeightTable
from mindspeed_rl.models.spec import ModelSpec

CLASSIFIER = "ForSequenceClassification"
# Keys that have a default here and that transformers and vLLM read as numbers whatever they hold.
_NEVER_NULL = frozenset({"rms_norm_eps"})


@cache
def _families() -> tuple[tuple[WeightTable, Callable[[Mapping[str, Any]], ModelSpec]], ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = [importlib.import_module(f"{families.__name__}.{name}") for name in names]
    return tuple((module.TABLE, module.spec_from_hf) for module in modules)


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed ``config.json`` of any known family.

    Raises:
        UsageError: An architecture is unknown, a key is missing, a value has a wrong type, or a
            feature is not computed.
    """
    for key in _NEVER_NULL & {key for key, value in config.items() if value is None}:
        raise UsageError(f"config.json: {key} null: must be a number, or left out; give it a value")
    config = {key: value for key, value in config.items() if value is not None}
    names = _architectures(config)
    for table, build in _families():
        if any(name in table.architectures for name in names):
            try:
                spec = build(config)
            except KeyError as error:
                raise UsageError(f"config.json lacks the key {error} of {names[0]}") from error
            except (ArithmeticError, AttributeError, TypeError, MemoryError) as error:
                raise UsageError(
                    f"config.json: a number of {names[0]} cannot be: {error!r}; give the "
                    "config.json of the published model"
                ) from error
            for rotated in {attention.rope_dim for attention in spec.attentions}:
                if rotated % 2:
                    raise UsageError(
                        f"config.json: heads with {rotated} rotated channels; rotary embeddings "
                        "turn pairs, so it must be even"
                    )
            return spec
    known = sorted(name for table, _ in _families() for name in table.architectures)
    raise UsageError(f"config.json: architectures {names} are not supported; known: {known}")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = read(config, list, "architectures", default=[])
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"config.json: architectures {names}: must be a list of names")
    return names


def value_spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a critic or reward model: one number per token in place of log-probs.

    Of a causal language model the body is taken, of a sequence classifier also the head.

    Raises:
        UsageError: As :func:`spec_from_hf_config`, or a classifier has several labels.
    """
    names = _architectures(config)
    is_classifier = any(name.endswith(CLASSIFIER) for name in names)
    labels = len(read(config, dict, "id2label", default={}))
    labels = labels or read(config, int, "num_labels", default=2)
    if is_classifier and labels != 1:
        raise UsageError(
            f"config.json: {names} with {labels} labels (id2label); a value is one number, so "
            "allowed: 1"
        )
    bodies = [name.replace(CLASSIFIER, "ForCausalLM") for name in names]
    spec = spec_from_hf_config({**config, "architectures": bodies})
    return replace(spec, head="value", tie_embeddings=False)


def weight_table(family: str) -> WeightTable:
    """The weight table of a family."""
    for table, _ in _families():
        if table.family == family:
            return table
    raise LookupError(f"no weight table for family {family!r}")
