"""Files of a Hugging Face checkpoint that describe the model rather than hold weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.models.hf_code import code_files
from mindspeed_rl.models.hf_files import VOCABULARY_FILES

_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    *VOCABULARY_FILES,
)


def side_files(source: Path, tokenizer: Path) -> list[Path]:
    """List the config files of ``source``, the tokenizer files of ``tokenizer``, and their code.

    Raises:
        UsageError: Code that the config or the tokenizer names is missing.
    """
    folders = ((source, _CONFIG_FILES), (tokenizer, _TOKENIZER_FILES))
    files = [folder / name for folder, names in folders for name in names]
    return [file for file in files if file.is_file()] + code_files(source, tokenizer)


def config_text(
    source: Path, dtype: torch.dtype, keys: Mapping[str, Any], without: Collection[str] = ()
) -> str:
    """Make the ``config.json`` of a checkpoint that is derived from another one.

    Args:
        source: Directory of the other checkpoint.
        dtype: Element type of the weights.
        keys: Keys to set.
        without: Keys to leave out.
    """
    config = json.loads((source / "config.json").read_text())
    # transformers 5 writes "dtype"; earlier versions read only "torch_dtype".
    for key in {"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    kept = {key: value for key, value in config.items() if key not in without}
    return json.dumps(kept | dict(keys), indent=2)
