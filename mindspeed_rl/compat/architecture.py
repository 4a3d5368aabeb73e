"""Comparison of the architecture flags of pretraining scripts with the HF config.

The model is built from the HF config alone, so these flags change nothing; a contradiction means
that the script and ``--hf-checkpoint`` are of different models. ``compat/foreign_flags.toml`` lists
which value each flag is compared with.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mindspeed_rl.compat.classify import UsedFlag
from mindspeed_rl.compat.foreign_flags import foreign_flags
from mindspeed_rl.core.errors import Mistakes, UsageError

HfConfig = Mapping[str, Any]

_NOT_SET = ("-1",)  # how MindSpeed-LLM scripts spell "this feature is not used"


def value_in(config: HfConfig, where: str) -> object:
    """The config's value at a place in the notation of the file; ``None`` where there is none."""
    for key in where.split():
        if key.startswith("@"):
            found = _FUNCTIONS[key[1:]](config)
        elif key.startswith("rope."):
            found = _rope(config).get(key[5:])
        elif key.endswith("?"):
            found = True if config.get(key[:-1]) else None
        else:
            found = config.get(key)
        if found is not None:
            return found
    return None


def _rope(config: HfConfig) -> HfConfig:
    """The config with its rope parameters, which transformers before 5 named ``rope_scaling``."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    return {**config, **(scaling or {}), **(parameters or {})}


def _rope_type(config: HfConfig) -> object:
    kind = value_in(config, "rope.rope_type rope.type")
    return None if kind == "default" else kind


def _shared_size(config: HfConfig) -> object:
    """Width of all shared experts together, as Megatron counts it."""
    if size := config.get("shared_expert_intermediate_size"):
        return size
    shared, each = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    return shared * each if shared and each else None


def _norm_topk(config: HfConfig) -> object:
    """Whether router weights are normalised; a model without experts has none to normalise."""
    has_experts = value_in(config, "num_experts n_routed_experts num_local_experts") is not None
    return bool(config.get("norm_topk_prob")) or not has_experts or None


_FUNCTIONS: Mapping[str, Callable[[HfConfig], object]] = {
    "shared_size": _shared_size,
    "norm_topk": _norm_topk,
    "router_bias": lambda config: config.get("topk_method") == "noaux_tc" or None,
    "interleaved_rope": lambda config: (
        bool({"rope_interleave", "kv_lora_rank"} & config.keys()) or None
    ),
    "is_rope_scaled": lambda config: bool(_rope_type(config)) or None,
    "rope_type": _rope_type,
}


def check_foreign_architecture(compared: Iterable[UsedFlag], hf_config: HfConfig) -> None:
    """Compare the architecture flags that a script passed with the model.

    Args:
        compared: Flags of ``ParsedArguments.checked_arch``.
        hf_config: Parsed ``config.json``, with ``spec.NAME`` for properties of the model that it
            does not say.

    Raises:
        UsageError: Flags contradict the model; the message names each, its value and the model's.
    """
    mistakes = Mistakes()
    for used in compared:
        with mistakes:
            if text := _contradiction(used, hf_config):
                raise UsageError(f"{text}; remove the flag, or give the right --hf-checkpoint")
    mistakes.report()


def _contradiction(used: UsedFlag, config: HfConfig) -> str:
    """Describe what is wrong with one flag; empty where nothing is."""
    comparison = foreign_flags()[used.flag].comparison
    assert comparison is not None, f"{used.flag} is not compared"
    if used.values == _NOT_SET:
        return ""
    if used.flag == "--moe-layer-freq" and "[" in "".join(used.values):
        given: object = _layer_pattern(used)
        real: object = _moe_layers(config)
    else:
        given = _value(used.values[0]) if used.values else True
        real = value_in(config, comparison.where)
    has = f"{' '.join([used.flag, *used.values])} but the {config.get('model_type', 'given')} model"
    if real is None:
        accepted = [_value(text) for text in comparison.unset]
        return "" if given in accepted else f"{has} has no {comparison.feature}"
    return "" if given == _comparable(real) else f"{has} has {real}"


def _value(text: str) -> object:
    """Read a number or a tuple of numbers; other text is returned in lower case."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text.lower()
    return numbers[0] if len(numbers) == 1 else numbers


def _comparable(real: object) -> object:
    """Convert a value of the HF config into the form of :func:`_value`."""
    if isinstance(real, list):
        return tuple(float(part) for part in real)
    return real.lower() if isinstance(real, str) else real


def _moe_layers(config: HfConfig) -> object:
    """For every layer 1 if it has experts, else 0; ``None`` for a model without experts."""
    if value_in(config, "num_experts n_routed_experts num_local_experts") is None:
        return None
    layers = range(config["num_hidden_layers"])
    dense = {*range(config.get("first_k_dense_replace") or 0), *config.get("mlp_only_layers", ())}
    if every := config.get("decoder_sparse_step"):
        return tuple(int(i not in dense and (i + 1) % every == 0) for i in layers)
    every = config.get("moe_layer_freq") or 1
    return tuple(int(i not in dense and i % every == 0) for i in layers)


def _layer_pattern(used: UsedFlag) -> tuple[int, ...]:
    """Read Megatron's notation for lists of layers: ``([0]*3+[1]*58)``.

    Raises:
        UsageError: The text holds anything but sums and repetitions of lists of 0 and 1.
    """

    def fold(node: ast.expr) -> tuple[int, ...]:
        match node:
            case ast.List(elts=items):
                return tuple(ast.literal_eval(item) for item in items)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return fold(left) + fold(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(count))):
                return fold(left) * count
        raise UsageError(ast.unparse(node))

    try:
        return fold(ast.parse(used.values[0], mode="eval").body)
    except (ValueError, SyntaxError) as error:
        raise UsageError(
            f"{used.flag} {used.values[0]}: must be an integer or a pattern like ([0]*3+[1]*58); "
            "remove the flag, the HF config says which layers have experts"
        ) from error
