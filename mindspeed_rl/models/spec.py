"""The architecture of a model as plain numbers, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable
from mindspeed_rl.models.layers import (
    Attention,
    DenseMLP,
    LayerSpec,
    MoE,
    check_positive,
)
from mindspeed_rl.models.rope import RopeSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All numbers that the trainer, the engine layout and the planner need.

    Weight tables name their dimensions and conditions by the attribute names of this class and of
    the parts of its layers.

    Attributes:
        layers: All layers, each with its kind of attention and of MLP.
        intermediate_size: Value of the config; flags and checkpoints state it also where no MLP is
            dense.
        num_mtp_layers: Number of multi-token-prediction layers of the checkpoint, which are not
            built.
        head: Output per token: ``"lm"`` log-probs of the vocabulary, ``"value"`` one number.
    """

    family: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_embeddings: bool
    num_mtp_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    head: str = "lm"

    def __post_init__(self) -> None:
        check_positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
        )

    # Layers.

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def layer(self, number: int) -> LayerSpec:
        """A layer (from 0); multi-token-prediction layers, numbered last, are like the last one."""
        return self.layers[min(number, self.num_layers - 1)]

    def at(self, layer: int) -> ModelSpec:
        """The model with one of its layers alone, so that its dimensions are that layer's."""
        return replace(self, layers=(self.layer(layer),))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers (from 0) of the layers with experts."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.moe)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different attentions of the layers, in the order of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @property
    def latent_attention(self) -> bool:
        """Whether any layer has latent attention."""
        return any(layer.latent_attention for layer in self.layers)

    def cached_values(self, tp: int) -> int:
        """Number of elements that an engine of ``tp`` ranks caches per token on each rank."""
        return sum(layer.attention.cached_values(tp) for layer in self.layers)

    # Properties that the trainer and the engine need to be equal in all layers.

    @property
    def attention(self) -> Attention:
        """The attention that all layers have, for readers of Megatron's configuration.

        It has one attention for all layers. Whatever has one per layer reads :attr:`layers`.

        Raises:
            UsageError: The layers differ in attention.
        """
        found = self._agreed("attention", (layer.attention for layer in self.layers))
        assert found is not None
        return found

    @property
    def moe(self) -> MoE | None:
        """The experts that all layers with experts have; ``None`` where no layer has experts.

        Raises:
            UsageError: Layers with experts differ in them.
        """
        return self._agreed("experts", (layer.moe for layer in self.layers if layer.moe))

    @property
    def num_experts(self) -> int:
        """The number of routed experts in each layer with experts; 0 where no layer has experts.

        Raises:
            UsageError: Layers with experts differ in this number.
        """
        counts = (layer.moe.num_experts for layer in self.layers if layer.moe)
        return self._agreed("the number of experts", counts) or 0

    @property
    def ffn_hidden_size(self) -> int:
        """The intermediate size of all dense MLPs; the config's value where no MLP is dense.

        Raises:
            UsageError: Dense MLPs differ in this size.
        """
        sizes = (m.ffn_hidden_size for m in (x.mlp for x in self.layers) if isinstance(m, DenseMLP))
        return self._agreed("the size of dense MLPs", sizes) or self.intermediate_size

    def _agreed(self, what: str, values: Iterable[_T]) -> _T | None:
        """Return the one value that all ``values`` have; ``None`` where there is no value."""
        objects = {id(value): value for value in values}  # layers share their parts
        different = list(dict.fromkeys(objects.values()))
        if len(different) > 1:
            raise UsageError(
                f"config.json: the layers of this {self.family} model differ in {what}: "
                f"{', '.join(map(str, different))}; the trainer and the engine take one for all "
                "layers, so give a model whose layers agree"
            )
        return different[0] if different else None

    # Dimensions and conditions of weight tables.

    def dims(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes behind dimension names, e.g. ``("q_size", "hidden_size")``.

        Raises:
            UsageError: Layers have different values of a name; see :meth:`at`.
        """
        return tuple(self._dim(name) for name in names)

    def _dim(self, name: str) -> int:
        if hasattr(self, name):
            return int(getattr(self, name))
        parts = (part for layer in self.layers for part in (layer.attention, layer.mlp))
        found = self._agreed(name, (getattr(part, name) for part in parts if hasattr(part, name)))
        if found is None:
            raise LookupError(f"no part of a {self.family} model has the dimension {name}")
        return int(found)

    @property
    def mtp_input_size(self) -> int:
        """Columns of a multi-token-prediction layer's projection of embedding and hidden state."""
        return 2 * self.hidden_size

    @property
    def num_values(self) -> int:
        """Number of rows of a value head."""
        return 1

    @property
    def lm_head(self) -> bool:
        """Whether the output is a distribution over the vocabulary."""
        return self.head == "lm"

    @property
    def value_head(self) -> bool:
        """Whether the output is one number per token."""
        return self.head == "value"


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids of a config, which holds one id, a list, or nothing."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(one) is int and one >= 0 for one in ids):
        raise UsageError(f"config.json: eos_token_id {eos!r}: must be a token id or a list of them")
    return ids


def read_hf_config(
    checkpoint: str | Path, *, or_file: bool = False, flag: str = "--hf-checkpoint"
) -> dict[str, Any]:
    """Read the ``config.json`` of a Hugging Face checkpoint directory.

    Args:
        checkpoint: Directory of the checkpoint.
        or_file: Whether ``checkpoint`` may be the ``config.json`` itself, for uses without weights.
        flag: Flag that names the checkpoint, for messages.

    Raises:
        UsageError: No file is there, or it holds no JSON object.
    """
    path = Path(checkpoint)
    if not or_file or path.suffix != ".json":
        path /= "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        wanted = (
            "a config.json, or a directory that holds it"
            if or_file
            else "a directory that holds config.json, the tokenizer and safetensors weights"
        )
        what = f"{path} is missing"
        if Path(checkpoint).is_file():
            what, wanted = "is a file", f"its folder, {wanted.removeprefix('a config.json, or ')}"
        raise UsageError(f"{flag} {checkpoint}: {what}; give {wanted}") from None
    except OSError as error:
        raise UsageError(f"{flag} {checkpoint}: {path}: {why_unreadable(path, error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {checkpoint}: {path} is no UTF-8 text: {error}") from error
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {checkpoint}: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{flag} {checkpoint}: {path} holds no JSON object")
    return config
