"""Architecture flags of pretraining scripts that are no own flags, compared with the HF config.

The model is built from the HF config alone, so these flags change nothing; a contradiction says
that the script and ``--hf-checkpoint`` are of different models. Layer 0.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.compat import UsedFlag

HfConfig = Mapping[str, Any]

_NOT_SET = ("-1",)  # how MindSpeed-LLM scripts spell "this feature is not used"


@dataclass(frozen=True, slots=True)
class Counterpart:
    """What one or more foreign flags are compared with.

    Attributes:
        flags: spellings as the compat tables name them.
        feature: what a model lacks for which ``read`` gives None, in words after "has no".
        read: the model's value; ``True`` for switches; None where the model lacks the feature.
        unset: values that a model without the feature accepts: zero or Megatron's default.
    """

    flags: tuple[str, ...]
    feature: str
    read: Callable[[HfConfig], object]
    unset: tuple[str, ...] = ()


def _row(
    flags: str, feature: str, read: str | Callable[[HfConfig], object], unset: str = ""
) -> Counterpart:
    """A row of the table; a text ``read`` lists alternative keys of the HF config."""
    reader = read if callable(read) else _first_of(tuple(read.split()))
    return Counterpart(tuple(flags.split()), feature, reader, tuple(unset.split()))


def _first_of(keys: tuple[str, ...]) -> Callable[[HfConfig], object]:
    return lambda config: next((config[key] for key in keys if config.get(key) is not None), None)


def _rope(*keys: str) -> Callable[[HfConfig], object]:
    """Reads rope parameters: a dict of their own in transformers 5, ``rope_scaling`` before."""

    def read(config: HfConfig) -> object:
        scaling = {
            **config,
            **(config.get("rope_scaling") or {}),
            **(config.get("rope_parameters") or {}),
        }
        return _first_of(keys)(scaling)

    return read


def _rope_type(config: HfConfig) -> object:
    kind = _rope("rope_type", "type")(config)
    return None if kind == "default" else kind


def _shared_size(config: HfConfig) -> object:
    """Width of all shared experts together, as Megatron counts it."""
    if size := config.get("shared_expert_intermediate_size"):
        return size
    shared, each = config.get("n_shared_experts"), config.get("moe_intermediate_size")
    return shared * each if shared and each else None


def _has_query_key_norm(config: HfConfig) -> object:
    """Qwen3 and latent attention have it by design, other families by a switch."""
    by_family = str(config.get("model_type", "")).startswith("qwen3")
    return by_family or "kv_lora_rank" in config or config.get("use_qk_norm") or None


def _is_true(key: str) -> Callable[[HfConfig], object]:
    return lambda config: True if config.get(key) else None


_EXPERTS = "num_experts n_routed_experts num_local_experts"

COUNTERPARTS = (
    _row("--qk-layernorm", "query/key norm", _has_query_key_norm),
    _row("--num-experts", "experts", _EXPERTS, "0"),
    _row("--moe-router-topk", "experts", "num_experts_per_tok", "2"),
    _row("--moe-ffn-hidden-size --moe-intermediate-size", "experts", "moe_intermediate_size"),
    _row("--moe-layer-freq", "experts", "moe_layer_freq decoder_sparse_step", "1"),
    _row("--first-k-dense-replace", "leading dense layers", "first_k_dense_replace", "0"),
    _row("--moe-shared-expert-intermediate-size", "shared experts", _shared_size, "0"),
    _row("--n-shared-experts", "shared experts", "n_shared_experts", "0"),
    _row(
        "--moe-shared-expert-gate --shared-expert-gate",
        "gated shared expert",
        _is_true("shared_expert_intermediate_size"),
    ),
    _row("--moe-router-num-groups --n-group", "expert groups", "n_group", "1"),
    _row("--moe-router-group-topk --topk-group", "expert groups", "topk_group", "1"),
    _row(
        "--moe-router-topk-scaling-factor --routed-scaling-factor",
        "scaling of routed experts",
        "routed_scaling_factor",
        "1",
    ),
    _row(
        "--moe-router-score-function",
        "router scores other than softmax",
        "scoring_func",
        "softmax",
    ),
    _row("--norm-topk-prob", "normalised top-k weights", _is_true("norm_topk_prob")),
    _row(
        "--moe-router-enable-expert-bias",
        "router bias",
        lambda config: True if config.get("topk_method") == "noaux_tc" else None,
    ),
    _row(
        "--multi-latent-attention --multi-head-latent-attention",
        "latent attention",
        _is_true("kv_lora_rank"),
    ),
    _row("--q-lora-rank", "compressed queries", "q_lora_rank", "0"),
    _row("--kv-lora-rank", "latent attention", "kv_lora_rank", "32"),
    _row("--qk-head-dim --qk-nope-head-dim", "latent attention", "qk_nope_head_dim", "128"),
    _row("--qk-pos-emb-head-dim --qk-rope-head-dim", "latent attention", "qk_rope_head_dim", "64"),
    _row("--v-head-dim", "latent attention", "v_head_dim", "128"),
    _row("--mtp-num-layers", "multi-token-prediction layers", "num_nextn_predict_layers", "0"),
    _row(
        "--rotary-percent --partial-rotary-factor",
        "partial rotary embedding",
        _rope("partial_rotary_factor"),
        "1",
    ),
    _row(
        "--rotary-interleaved",
        "interleaved rotary embedding",
        lambda config: True if {"rope_interleave", "kv_lora_rank"} & config.keys() else None,
    ),
    _row(
        "--use-rope-scaling",
        "rope scaling",
        lambda config: True if _rope_type(config) else None,
    ),
    _row("--rope-type --rope-scaling-type", "rope scaling", _rope_type, "rope default"),
    _row("--rope-scaling-factor", "rope scaling", _rope("factor"), "1 8"),
    _row("--rotary-scaling-factor --yarn-scaling-factor", "rope scaling", _rope("factor"), "1"),
    _row("--dynamic-factor", "rope scaling", _rope("alpha", "factor"), "1"),
    _row("--mscale --rope-scaling-mscale", "rope scaling", _rope("mscale"), "0 1"),
    _row(
        "--mscale-all-dim --rope-scaling-mscale-all-dim",
        "rope scaling",
        _rope("mscale_all_dim"),
        "0 1",
    ),
    _row("--beta-fast --rope-scaling-beta-fast", "rope scaling", _rope("beta_fast"), "32"),
    _row("--beta-slow --rope-scaling-beta-slow", "rope scaling", _rope("beta_slow"), "1"),
    _row(
        "--original-max-position-embeddings --rope-scaling-original-max-position-embeddings",
        "rope scaling",
        _rope("original_max_position_embeddings"),
    ),
    _row("--low-freq-factor", "rope scaling", _rope("low_freq_factor")),
    _row("--high-freq-factor", "rope scaling", _rope("high_freq_factor")),
    _row("--long-factor", "rope scaling", _rope("long_factor")),
    _row("--short-factor", "rope scaling", _rope("short_factor")),
    _row("--long-mscale", "rope scaling", _rope("long_mscale")),
    _row("--short-mscale", "rope scaling", _rope("short_mscale")),
)
COUNTERPART_OF = {flag: row for row in COUNTERPARTS for flag in row.flags}


def check_foreign_architecture(checked_arch: Iterable[UsedFlag], hf_config: HfConfig) -> None:
    """Compare the architecture flags that a script passed with the model.

    Args:
        checked_arch: ``ParsedArguments.checked_arch``.
        hf_config: the parsed ``config.json``.

    Raises:
        ValueError: every contradicting flag, its value, and what the model has.
    """
    wrong = [text for used in checked_arch if (text := _contradiction(used, hf_config))]
    if wrong:
        raise ValueError(
            f"flags contradict the config.json of --hf-checkpoint: {'; '.join(wrong)}; remove the "
            "flags or point --hf-checkpoint at the right model"
        )


def _contradiction(used: UsedFlag, config: HfConfig) -> str:
    """What is wrong with one flag, or an empty string."""
    row = COUNTERPART_OF[used.flag]
    typed = " ".join([used.flag, *used.values])
    family = config.get("model_type", "given")
    if used.values == _NOT_SET:
        return ""
    if used.flag == "--moe-layer-freq" and "[" in "".join(used.values):
        given: object = _layer_pattern(used)
        real: object = _moe_layers(config)
    else:
        given, real = (_value(used.values[0]) if used.values else True), row.read(config)
    if real is None:
        accepted = [_value(text) for text in row.unset]
        return "" if given in accepted else f"{typed} but the {family} model has no {row.feature}"
    return "" if given == _comparable(real) else f"{typed} but the {family} model has {real}"


def _value(text: str) -> object:
    """A number, a tuple of numbers, or lower-case text."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return text.lower()
    return numbers[0] if len(numbers) == 1 else numbers


def _comparable(real: object) -> object:
    """A value of a HF config in the form of :func:`_value`."""
    if isinstance(real, list):
        return tuple(float(part) for part in real)
    return real.lower() if isinstance(real, str) else real


def _moe_layers(config: HfConfig) -> object:
    """Per layer of the model 1 for experts and 0 for dense; None where there are no experts."""
    if _first_of(tuple(_EXPERTS.split()))(config) is None:
        return None
    layers = range(config["num_hidden_layers"])
    dense = {*range(config.get("first_k_dense_replace") or 0), *config.get("mlp_only_layers", ())}
    if every := config.get("decoder_sparse_step"):
        return tuple(int(i not in dense and (i + 1) % every == 0) for i in layers)
    every = config.get("moe_layer_freq") or 1
    return tuple(int(i not in dense and i % every == 0) for i in layers)


def _layer_pattern(used: UsedFlag) -> tuple[int, ...]:
    """Megatron's spelling of a list of layers: ``([0]*3+[1]*58)``.

    Raises:
        ValueError: anything but sums and repetitions of lists of 0 and 1.
    """

    def fold(node: ast.expr) -> tuple[int, ...]:
        match node:
            case ast.List(elts=items):
                return tuple(ast.literal_eval(item) for item in items)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return fold(left) + fold(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(count))):
                return fold(left) * count
        raise ValueError(ast.unparse(node))

    try:
        return fold(ast.parse(used.values[0], mode="eval").body)
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"{used.flag} {used.values[0]}: must be an integer or a pattern like ([0]*3+[1]*58); "
            "remove the flag, the HF config says which layers have experts"
        ) from error
