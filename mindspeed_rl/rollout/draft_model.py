"""A model of its own that drafts for the policy: its files, its sizes, and whether it fits.

Its weights are read from its directory when an engine is built, and no update changes them. A dry
run and the checks of flags use this module, so it imports neither torch nor an engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError, refuse
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.hf_files import find_weights
from mindspeed_rl.models.safetensors_files import StoredEntry, safetensors_entries
from mindspeed_rl.models.spec import ModelSpec, read_hf_config

OPTION = "speculative_config"
FLAG = "--vllm-speculative-config"
METHODS = ("draft_model", "eagle", "eagle3")
"""Methods whose drafts come from a model with weights in a directory."""
# The other methods draft from texts.
_OF_TEXTS = ("ngram", "suffix", "custom_class")
_TP = "draft_tensor_parallel_size"
_KEYS = ("method", "model", "num_speculative_tokens", _TP)
_FLOATS = ("F32", "BF16", "F16")
# Tables of an EAGLE-3 head that translate the ids of its smaller vocabulary.
_TABLES = ("d2t", "t2d")
# Keys of a config.json that tell of layers in which drafts were not verified.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Sizes of a model that drafts.

    Attributes:
        method: How it drafts, one of :data:`METHODS`.
        folder: Its directory.
        tokens: Tokens of a draft.
        shared: Elements of matrices, of which every tensor-parallel rank has its part.
        whole: Elements of tensors that every rank has whole.
        layers: Layers with a cache.
        hidden: Channels of a token.
        heads: Heads of its attention.
        kv_heads: Heads of keys and values.
        head_dim: Channels of a head.
        vocab_size: Tokens of its vocabulary.
        given_tp: The ``draft_tensor_parallel_size`` that was given, ``None`` without it.
    """

    method: str
    folder: Path
    tokens: int
    shared: int
    whole: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    given_tp: int | None

    @property
    def is_head(self) -> bool:
        """Whether it drafts from hidden states of the policy, and may share its embeddings."""
        return self.method != "draft_model"

    def elements(self, tp: int) -> int:
        """Return the elements of its weights on a rank of ``tp``, rows of padding left out."""
        return -(-self.shared // tp) + self.whole

    def cached_values(self, tp: int) -> int:
        """Return the elements that a rank of ``tp`` caches of a token."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim

    def buffered_values(self, tokens: int) -> int:
        """Return the elements of vLLM's buffers for a step of so many tokens, which stay."""
        return 2 * tokens * self.hidden  # hidden states, embedded inputs


def draft_model_of(options: Mapping[str, object]) -> DraftModel | None:
    """Return the model that drafts by the engine's options; ``None``: drafts come from no model.

    Raises:
        UsageError: There is one, and it cannot be read, or its drafts are not verified.
    """
    given = options.get(OPTION)
    if not isinstance(given, Mapping) or given.get("method") not in METHODS:
        return None
    folder, tokens = _checked(given)
    return _read(given["method"], folder, tokens, given.get(_TP))


def cached_values(spec: ModelSpec, draft: DraftModel | None, tp: int) -> int:
    """Return the elements that a rank of ``tp`` caches of a token, for policy and drafts. Pure."""
    return spec.cached_values(tp) + (0 if draft is None else draft.cached_values(tp))


def check_own_drafts(options: Mapping[str, object]) -> None:
    """Refuse a ``--vllm-speculative-config`` whose drafts are not verified. Local; reads headers.

    Raises:
        UsageError: The value is no configuration of a method that may be used, or its model cannot
            be read.
    """
    if OPTION not in options:
        return
    given = options[OPTION]
    method = given.get("method") if isinstance(given, Mapping) else None
    if method not in (*_OF_TEXTS, *METHODS):
        raise UsageError(
            f'{FLAG} {_text(given)}: must be a JSON object whose "method" is one of '
            f"{', '.join((*_OF_TEXTS, *METHODS))}. MTP layers are part of the policy, and neither "
            "training nor updates of the engine have their weights; the others were not run"
        )
    draft_model_of(options)


def check_draft_model(
    draft: DraftModel, spec: ModelSpec, engine: EngineLayout, tokenizer: str
) -> None:
    """Refuse a model that drafts for another policy or in an engine where it was not run. Local.

    Args:
        draft: The model.
        spec: Spec of the policy.
        engine: Layout of the engine's ranks.
        tokenizer: Directory of the policy's tokenizer.

    Raises:
        UsageError: It does not fit; names each contradiction.
    """
    where = f"{FLAG}: {draft.method} of {draft.folder}"
    refuse(
        f"{where}: {reason}; {fix}"
        for applies, reason, fix in (
            (
                engine.dp > 1,
                f"not with --rollout-dp {engine.dp}: each of its passes would be one more "
                "reduction of the engine's ranks, which agree once in a step",
                "use --rollout-drafts history, or --rollout-dp 1",
            ),
            (
                spec.latent_attention,
                "the policy has latent attention, whose cache vLLM does not put into blocks with "
                "that of another kind",
                "use --rollout-drafts history",
            ),
            (
                draft.vocab_size != spec.vocab_size,
                f"its vocabulary has {draft.vocab_size} tokens, the policy's {spec.vocab_size}",
                "give a model with the policy's tokenizer and vocab_size",
            ),
            (
                draft.is_head and draft.hidden != spec.hidden_size,
                f"its hidden_size is {draft.hidden}, and it reads hidden states of the policy, of "
                f"{spec.hidden_size} channels",
                "give a head that was trained for this model",
            ),
            (
                draft.heads % engine.tp != 0,
                f"--rollout-tp {engine.tp} does not divide its {draft.heads} attention heads",
                "choose another --rollout-tp",
            ),
            (
                max(draft.kv_heads, engine.tp) % min(draft.kv_heads, engine.tp) != 0,
                f"--rollout-tp {engine.tp} and its {draft.kv_heads} heads of keys and values: "
                "neither divides the other",
                "choose another --rollout-tp",
            ),
            (
                draft.given_tp not in (None, engine.tp),
                f"its {_TP} is {draft.given_tp}, and it is cut like the "
                f"policy, by --rollout-tp {engine.tp}",
                "remove the key",
            ),
        )
        if applies
    )
    _check_tokens(where, draft.folder, Path(tokenizer))


def _checked(given: Mapping[str, Any]) -> tuple[Path, int]:
    """Return directory and tokens of a draft of a given configuration."""
    about = f"{FLAG} {_text(given)}"
    if unknown := sorted(given.keys() - set(_KEYS)):
        raise UsageError(
            f"{about}: {unknown[0]} was not verified with a model that drafts; allowed are "
            f"{', '.join(_KEYS)}. Remove it (a revision of the hub is ORG/NAME@REVISION)"
        )
    tokens, model = given.get("num_speculative_tokens"), given.get("model")
    if type(tokens) is not int or tokens < 1:
        raise UsageError(f"{about}: num_speculative_tokens must be a whole number of at least 1")
    if type(given.get(_TP, 1)) is not int:
        raise UsageError(f"{about}: {_TP} must be a whole number, that of --rollout-tp")
    if not isinstance(model, str) or not model:
        raise UsageError(f"{about}: model must be the directory of the model that drafts")
    if not Path(model).is_dir():
        raise UsageError(
            f"{about}: {model} is no directory; give one with config.json and safetensors "
            "weights, or ORG/NAME of the hub"
        )
    return Path(model), tokens


@lru_cache(maxsize=8)  # every change that a dry run tries asks again
def _read(method: str, folder: Path, tokens: int, given_tp: int | None) -> DraftModel:
    config = read_hf_config(folder, flag=f"{FLAG}: model")
    _check_kind(method, folder, config)
    entries = _weights(folder)
    heads = _number(folder, config, "num_attention_heads")
    hidden = _number(folder, config, "hidden_size")
    floats = {name: math.prod(e.shape) for name, e in entries.items() if name not in _TABLES}
    # The projection of an EAGLE head and all vectors are whole on every rank.
    whole = {n for n in floats if n.endswith("fc.weight") or len(entries[n].shape) < 2}
    return DraftModel(
        method=method,
        folder=folder,
        tokens=tokens,
        shared=sum(size for name, size in floats.items() if name not in whole),
        whole=sum(floats[name] for name in whole),
        layers=_number(folder, config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(folder, config, "num_key_value_heads", heads),
        head_dim=_number(folder, config, "head_dim", hidden // heads),
        vocab_size=_number(folder, config, "vocab_size"),
        given_tp=given_tp,
    )


def _check_kind(method: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse kinds of models that were not run as drafting ones."""
    slides = config.get("use_sliding_window", config.get("sliding_window") is not None)
    types = config.get("layer_types") or []
    others = not isinstance(types, list) or any(kind != "full_attention" for kind in types)
    refuse(
        f"{FLAG}: {folder / 'config.json'}: {reason}, with which drafts were not verified; {fix}"
        for applies, reason, fix in (
            (
                method != "draft_model" and config.get("model_type") != "llama",
                f"model_type {config.get('model_type')} of an EAGLE head",
                "give one of model_type llama",
            ),
            (
                any(config.get(key) for key in _EXPERTS),
                "it has experts",
                "give a dense model",
            ),
            (
                bool(config.get("kv_lora_rank")) or slides or others,
                "it has latent or sliding attention",
                "give a model whose layers all have full attention",
            ),
            (
                "quantization_config" in config,
                "it is quantised",
                "give weights in float32, bfloat16 or float16",
            ),
        )
        if applies
    )


def _weights(folder: Path) -> dict[str, StoredEntry]:
    """Return the headers of all weights.

    Raises:
        UsageError: A file is missing or broken, or a tensor has no type that is read.
    """
    found = find_weights(folder, f"{FLAG}: model")
    files = {found} if isinstance(found, Path) else set(found.values())
    entries: dict[str, StoredEntry] = {}
    for path in sorted(files):
        entries |= safetensors_entries(path)
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS and name not in _TABLES:
            raise UsageError(
                f"{FLAG}: {folder}: {name} is stored as {entry.dtype}; weights of a model that "
                f"drafts are {', '.join(_FLOATS)}, which become the engine's type. Convert them"
            )
    return entries


def _number(folder: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size of a config.json; ``default`` where it has none."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value < 1:
        raise UsageError(
            f"{FLAG}: {folder / 'config.json'}: {key} is {value}; it must be a whole number of at "
            "least 1 at the top level of the file"
        )
    return value


def _check_tokens(where: str, folder: Path, policy: Path) -> None:
    """Refuse a tokenizer in which an id stands for another token than in the policy's."""
    mine, wanted = (_vocabulary(place / "tokenizer.json") for place in (folder, policy))
    for number in sorted(mine.keys() & wanted.keys()):
        if mine[number] != wanted[number]:
            raise UsageError(
                f"{where}: token {number} is {mine[number]!r} in its tokenizer.json and "
                f"{wanted[number]!r} in {policy}; give a model with the policy's tokenizer"
            )


def _vocabulary(path: Path) -> dict[int, str]:
    """Return the tokens of a ``tokenizer.json`` by id; none where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = {number: token for token, number in vocab.items()}
        else:
            tokens = {number: token for number, (token, _) in enumerate(vocab)}
        tokens |= {added["id"]: added["content"] for added in content.get("added_tokens", ())}
        if wrong := [number for number in tokens if type(number) is not int]:
            raise ValueError(f"{wrong[0]!r} is no id of a token")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{FLAG}: {path}: no tokenizer: {error!r}") from error
    return tokens


def _text(given: object) -> str:
    return json.dumps(given) if isinstance(given, Mapping) else str(given)
