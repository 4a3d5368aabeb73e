"""Type checks of the values of a Hugging Face ``config.json``, made before any of them is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_rl.core.errors import UsageError

WHOLE = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "moe_layer_freq",
    "decoder_sparse_step",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
)
NUMBERS = (
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    "routed_scaling_factor",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)
FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "rope_interleave",
    "use_sliding_window",
    "truncate",
)
TEXTS = ("hidden_act", "scoring_func", "topk_method", "rope_type", "type")
OBJECTS = ("rope_scaling", "rope_parameters")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_list_of_whole(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_whole, value))


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (WHOLE, _is_whole, "a whole number, 0 or more"),
    (NUMBERS, _is_number, "a finite number"),
    (FLAGS, lambda value: isinstance(value, bool), "true or false"),
    (TEXTS, lambda value: isinstance(value, str), "a text"),
    (OBJECTS, lambda value: isinstance(value, Mapping), "an object"),
    (("mlp_only_layers",), _is_list_of_whole, "a list of layer numbers"),
    (("architectures",), _is_list_of_texts, "a list of names"),
)


def checked_values(config: Mapping[str, Any], inside: str = "") -> dict[str, Any]:
    """Check the values of a config and drop its nulls, which mean the same as an absent key.

    Keys that no family reads are not checked.

    Args:
        config: Parsed ``config.json``, or an object in it.
        inside: Key of that object; empty for the whole config.

    Raises:
        UsageError: A value has another type than its key needs.
    """
    values = {key: value for key, value in config.items() if value is not None}
    for keys, is_right, needed in _CHECKS:
        for key in keys:
            if key in values and not is_right(values[key]):
                where = f"{inside}.{key}" if inside else key
                raise UsageError(f"config.json: {where} {values[key]!r}: must be {needed}")
    nested = {key: checked_values(values[key], key) for key in OBJECTS if key in values}
    return values | nested
