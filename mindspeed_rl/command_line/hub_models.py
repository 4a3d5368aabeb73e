"""Turns names of models on the hub into directories of this machine, before anything reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_rl.command_line.arguments import ParsedArguments, Run
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.hub import how_to_get, snapshot

# Section and field of every flag that names a model, with the flag.
_MODELS = (
    ("model", "hf_checkpoint", "--hf-checkpoint"),
    ("model", "tokenizer_name_or_path", "--tokenizer-name-or-path"),
    ("critic", "critic_hf_checkpoint", "--critic-hf-checkpoint"),
    ("rewards", "reward_model_hf_checkpoint", "--reward-model-hf-checkpoint"),
    ("distillation", "teacher_hf_checkpoint", "--teacher-hf-checkpoint"),
)
# The option of the engine that may name a model that drafts.
_DRAFTS = "speculative_config"
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")


def with_local_models(parsed: ParsedArguments[Run], *, weights: bool) -> ParsedArguments[Run]:
    """Return a command line whose models are directories. Local.

    ``ORG/NAME`` and ``ORG/NAME@REVISION`` name a model of the hub where no such path exists. It is
    looked for in the hub's cache of this machine, and downloaded, once per node, where the user
    sets ``HF_HUB_OFFLINE=0``.

    Args:
        parsed: A parsed command line.
        weights: Whether weights are downloaded too.

    Raises:
        UsageError: A model is not there and cannot be downloaded.
    """
    config: Any = parsed.config
    for section, field, flag in _MODELS:
        part: Any = getattr(config, section, None)
        given = getattr(part, field, "")
        found = _of_flag(given, flag, weights)
        if found != given:
            config = replace(config, **{section: replace(part, **{field: found})})
    drafts = getattr(config, "engine_options", {}).get(_DRAFTS)
    if isinstance(drafts, Mapping) and isinstance(drafts.get("model"), str):
        # A prediction reads the headers of its weights.
        found = _directory(drafts["model"], as_flag(_DRAFTS), weights=True)
        options = config.engine_options | {_DRAFTS: {**drafts, "model": found}}
        config = replace(config, engine_options=options)
    return replace(parsed, config=config)


def _of_flag(given: str | tuple[str, ...], flag: str, weights: bool) -> str | tuple[str, ...]:
    """Return the directory of a model, or those of a list, whose models may be NAME=MODEL."""
    if isinstance(given, str):
        return _directory(given, flag, weights)
    parts = [text.rpartition("=") for text in given]
    return tuple(name + equals + _directory(model, flag, weights) for name, equals, model in parts)


def _directory(given: str, flag: str, weights: bool) -> str:
    match = _HUB_NAME.fullmatch(given)
    if match is None or Path(given).exists():
        return given
    name, revision = match[1], match[2] or ""
    try:
        return str(snapshot(name, revision, "model", None if weights else _WITHOUT_WEIGHTS))
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UsageError(
            f"{flag} {given}: no such directory, and as a model of the hub it cannot be had: "
            f"{reason}. Give a directory, or {how_to_get(name, revision, 'model')}"
        ) from error
