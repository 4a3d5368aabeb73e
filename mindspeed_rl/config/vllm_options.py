"""Engine options on the command line: ``--vllm-max-num-seqs 512`` (layer 0)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

PREFIX = "--vllm-"

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "model": "use --hf-checkpoint",
        "dtype": "use --rollout-dtype",
        "max_model_len": "use --seq-length",
        "kv_cache_memory_bytes": "use --rollout-kv-cache-gb",
        "seed": "use --seed",
        "tensor_parallel_size": "use --rollout-tp",
        "distributed_executor_backend": "engines run in the training processes",
        "generation_config": "sampling follows the --rl-default-* flags",
        "skip_tokenizer_init": "the engine reads and writes token ids",
        "load_format": "weights come from the trainer",
        "logprobs_mode": "the trainer compares log-probs after temperature",
    }
)
"""Options that the engine wrapper sets, and what a user does instead."""


def take_vllm_options(argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Split the engine options off a command line.

    Values are read as JSON, else kept as text; an option without a value is True. Of an option
    that is given twice the last value counts. Names may have hyphens or underscores.

    Returns:
        The other tokens in order, and the options by the names of ``vllm.LLM``.

    Raises:
        ValueError: an option that mindspeed_rl sets itself, or a prefix without a name.
    """
    rest: list[str] = []
    options: dict[str, object] = {}
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        typed, equals, value = token.partition("=")
        spelled = typed.replace("_", "-")
        if not spelled.startswith(PREFIX):
            rest.append(token)
            continue
        if not equals:
            has_value = position < len(argv) and not argv[position].startswith("--")
            value = argv[position] if has_value else "true"
            position += has_value
        options[_option_name(spelled)] = _read(value)
    return rest, options


def _option_name(spelled: str) -> str:
    name = spelled.removeprefix(PREFIX).replace("-", "_")
    if not name:
        raise ValueError(f"{PREFIX}: must be followed by the name of an engine option")
    if name in RESERVED:
        raise ValueError(
            f"{spelled}: this option is set by mindspeed_rl; {RESERVED[name]} and remove this flag"
        )
    return name


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
