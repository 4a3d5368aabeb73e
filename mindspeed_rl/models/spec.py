"""The architecture of a model as plain numbers, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Mixture of experts.

    Attributes:
        num_experts: routed experts of one layer.
        top_k: experts per token.
        ffn_hidden_size: of one routed expert.
        shared_ffn_hidden_size: of all shared experts together; 0: there are none.
        layers: for every layer whether it has experts (the others have a dense MLP).
        score_function: ``"softmax"`` or ``"sigmoid"``.
        normalize_top_k: the weights of the chosen experts sum to 1.
        router_bias: a bias per expert takes part in the choice, but not in the weights.
        num_groups: experts are chosen from the best ``top_k_groups`` of so many groups; 1: of all.
        top_k_groups: see ``num_groups``.
        scaling_factor: routed outputs are multiplied by it.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    layers: tuple[bool, ...]
    shared_ffn_hidden_size: int = 0
    score_function: str = "softmax"
    normalize_top_k: bool = True
    router_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise UsageError(
                f"model config: num_experts_per_tok {self.top_k} is not between 1 and the "
                f"{self.num_experts} experts"
            )
        if self.num_experts % self.num_groups:
            raise UsageError(
                f"model config: n_group {self.num_groups} does not divide the "
                f"{self.num_experts} experts"
            )
        if not 0 < self.top_k_groups <= self.num_groups:
            raise UsageError(
                f"model config: topk_group {self.top_k_groups} is not between 1 and the "
                f"{self.num_groups} groups of n_group"
            )


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        q_lora_rank: size of the compressed query; 0: queries are not compressed.
        kv_lora_rank: size of the compressed key and value.
        nope_head_dim: channels of a query and key head without rotary embedding.
        rope_head_dim: channels of a query head, and of the shared key, with it.
        v_head_dim: channels of a value head.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All numbers that the trainer, the engine layout and the planner need.

    Weight tables name their dimensions and conditions by the attribute names of this class.
    ``num_mtp_layers`` counts the checkpoint's multi-token-prediction layers, which are not built.
    ``head`` says what comes out per token: ``"lm"`` log-probs of the vocabulary, ``"value"`` one
    number.
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
    rope: RopeSpec
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoESpec | None = None
    latent: LatentAttentionSpec | None = None
    num_mtp_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    head: str = "lm"

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"model config: {name} is {getattr(self, name)}, must be positive")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"model config: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )

    # Dimensions of weight tables.

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        if self.latent:
            return self.num_heads * (self.latent.nope_head_dim + self.latent.rope_head_dim)
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_size(self) -> int:
        """Columns of the output projection of attention."""
        return self.num_heads * (self.latent.v_head_dim if self.latent else self.head_dim)

    @property
    def rope_dim(self) -> int:
        """Rotated channels of a query head."""
        return self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def engine_positions(self) -> int:
        """Longest sequence of an engine, in tokens.

        vLLM's table of YaRN's angles ends with the stretched context, whatever the config's
        max_position_embeddings, and is read beyond its end without an error.
        """
        if self.rope.kind != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope.factor * self.rope.original_max_position)
        return min(self.max_position_embeddings, stretched)

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores before the softmax.

        Where all channels of queries and keys are rotated, the factor of cosine and sine amounts to
        its square here.
        """
        if self.latent:
            return 1 / math.sqrt(self.head_dim) * self.rope.softmax_mscale**2
        return 1 / math.sqrt(self.head_dim) * self.rope.attention_factor**2

    @property
    def q_lora_rank(self) -> int:
        """Size of the compressed query; 0 where there is none."""
        return self.latent.q_lora_rank if self.latent else 0

    @property
    def kv_lora_rank(self) -> int:
        """Size of the compressed key and value; 0 where there is none."""
        return self.latent.kv_lora_rank if self.latent else 0

    @property
    def kv_a_size(self) -> int:
        """Rows of the joint down projection of latent key/value and rotary key."""
        return self.latent.kv_lora_rank + self.latent.rope_head_dim if self.latent else 0

    @property
    def kv_b_size(self) -> int:
        """Rows of the up projection of latent key/value."""
        latent = self.latent
        return self.num_heads * (latent.nope_head_dim + latent.v_head_dim) if latent else 0

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 without."""
        return self.moe.num_experts if self.moe else 0

    @property
    def expert_ffn_size(self) -> int:
        """Intermediate size of a routed expert."""
        return self.moe.ffn_hidden_size if self.moe else 0

    @property
    def shared_ffn_size(self) -> int:
        """Intermediate size of the shared experts together."""
        return self.moe.shared_ffn_hidden_size if self.moe else 0

    @property
    def mtp_input_size(self) -> int:
        """Columns of the projection of a multi-token-prediction layer: embedding and hidden."""
        return 2 * self.hidden_size

    @property
    def num_values(self) -> int:
        """Rows of a value head."""
        return 1

    # Conditions of weight tables.

    @property
    def lm_head(self) -> bool:
        """Whether the output is a distribution over the vocabulary."""
        return self.head == "lm"

    @property
    def value_head(self) -> bool:
        """Whether the output is one number per token."""
        return self.head == "value"

    @property
    def router_bias(self) -> bool:
        """Whether routers have a bias for the choice of experts."""
        return self.moe is not None and self.moe.router_bias

    @property
    def compressed_query(self) -> bool:
        """Latent attention with a compressed query."""
        return self.q_lora_rank > 0

    @property
    def plain_query(self) -> bool:
        """Latent attention with a full query projection."""
        return self.latent is not None and self.q_lora_rank == 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers (from 0) with experts."""
        return tuple(layer for layer, has in enumerate(self.moe.layers) if has) if self.moe else ()

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts instead of a dense MLP."""
        return self.moe is not None and self.moe.layers[layer]

    def cached_values(self, tp: int) -> int:
        """Elements that an engine of ``tp`` ranks caches per token and layer on each rank."""
        if self.latent:
            return self.kv_a_size
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim

    def dims(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes behind dimension names, e.g. ``("q_size", "hidden_size")``."""
        return tuple(int(getattr(self, name)) for name in names)


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config, which holds one id, a list, or nothing."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def read_hf_config(
    checkpoint: str | Path, *, or_file: bool = False, flag: str = "--hf-checkpoint"
) -> dict[str, Any]:
    """The parsed ``config.json`` of a Hugging Face checkpoint directory.

    Args:
        checkpoint: the directory.
        or_file: whether it may be the ``config.json`` itself, for which no weights are needed.
        flag: whose value it is, for messages.

    Raises:
        UsageError: no file is there, or it holds no JSON object.
    """
    path = Path(checkpoint)
    if not or_file or path.suffix != ".json":
        path /= "config.json"
    if not path.is_file():
        wanted = (
            "a config.json, or a directory that holds it"
            if or_file
            else "a directory that holds config.json, the tokenizer and safetensors weights"
        )
        raise UsageError(f"{flag} {checkpoint}: {path} is missing; give {wanted}")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {checkpoint}: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{flag} {checkpoint}: {path} holds no JSON object")
    return config
