"""Folders and command lines as far as the checks before a start look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.arguments import parse

SMALL_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 307,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CLASSIFIER = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "tie_word_embeddings": True,
}

Run = TypeVar("Run", RLRunConfig, PretrainRunConfig)


def write_model(folder: Path, **changes: Any) -> Path:
    """A model: its configuration, empty weights and an empty tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN2 | changes))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def configured(run_type: type[Run], flags: str) -> Run:
    """The configuration of a command line."""
    return parse(run_type, flags.split(), "test").config
