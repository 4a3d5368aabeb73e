"""The architecture of a model as plain numbers, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All numbers that the trainer, the engine layout and the planner need.

    ``q_size`` and ``kv_size`` are the row counts of the fused query and key/value projections.
    Weight tables name their dimensions by the attribute names of this class.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} is {getattr(self, name)}, must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    def dims(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes behind dimension names, e.g. ``("q_size", "hidden_size")``."""
        return tuple(int(getattr(self, name)) for name in names)


def rope_theta_of(config: Mapping[str, Any]) -> float:
    """RoPE base from either spelling of a config; refuses scaled RoPE.

    transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type")
    if kind not in (None, "default"):
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported for this family; allowed: 'default'"
        )
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError("config.json: neither rope_theta nor rope_parameters.rope_theta is there")
    return float(theta)


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config, which holds one id, a list, or nothing."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def read_hf_config(checkpoint: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a Hugging Face checkpoint directory."""
    path = Path(checkpoint) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"--hf-checkpoint {checkpoint}: {path} is missing; give a directory that holds "
            "config.json, the tokenizer and safetensors weights"
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-checkpoint {checkpoint}: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--hf-checkpoint {checkpoint}: {path} holds no JSON object")
    return config
