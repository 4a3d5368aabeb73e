"""The Hugging Face tensors of a model, derived from its spec and weight table alone."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.spec import ModelSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """HF tensors of one shape that differ in layer and expert only.

    Attributes:
        pattern: Name of the tensors, with ``{l}`` for the layer and ``{e}`` for the expert.
        row: Name of the trainer's parameter that holds the tensors.
        shape: Shape of one tensor.
        layers: Numbers of the layers that have the tensors.
        num_experts: Number of tensors per layer; 1 where ``pattern`` has no expert.
        dtype: Element type of the tensors; empty: that of the model.
    """

    pattern: str
    row: str
    shape: tuple[int, ...]
    layers: tuple[int, ...]
    num_experts: int
    dtype: str

    @property
    def num_tensors(self) -> int:
        return len(self.layers) * self.num_experts

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors of the group."""
        return self.num_tensors * prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the group where the model is bfloat16."""
        return self.num_parameters * (4 if self.dtype == "float32" else 2)

    def names(self) -> Iterator[str]:
        """The names of all tensors of the group."""
        for layer in self.layers:
            of_layer = self.pattern.replace("{l}", str(layer))
            for expert in range(self.num_experts):
                yield of_layer.replace("{e}", str(expert))


def tensor_groups(spec: ModelSpec) -> tuple[TensorGroup, ...]:
    """All HF tensors of a model in the order of its weight table; a tied head is left out."""
    groups = []
    for row in weight_table(spec.family).trainer_rows(spec):
        if spec.tie_embeddings and row.tied_to:
            continue
        experts = spec.num_experts if isinstance(row, ExpertRow) else 1
        first_equals = row.first_equal_layers(spec)
        for first in dict.fromkeys(first_equals.values()):
            layers = tuple(n for n, equal in first_equals.items() if equal == first)
            groups += [
                TensorGroup(pattern, row.param, shape, layers, experts, row.dtype)
                for pattern, shape in row.hf_shapes(spec.at(first)).items()
            ]
    return tuple(groups)


def num_parameters(spec: ModelSpec) -> int:
    """Number of elements of all HF tensors of a model, the bias of routers among them."""
    return sum(group.num_parameters for group in tensor_groups(spec))


def pattern_of(name: str) -> str:
    """Replace the layer and the expert in a name by ``{l}`` and ``{e}``."""
    for placeholder in ("{l}", "{e}"):
        name = _NUMBER.sub(placeholder, name, count=1)
    return name


def nearest_group(name: str, groups: Sequence[TensorGroup]) -> TensorGroup:
    """The group whose names resemble ``name`` most."""
    pattern = pattern_of(name)
    likeness = [difflib.SequenceMatcher(None, pattern, g.pattern).ratio() for g in groups]
    return groups[likeness.index(max(likeness))]
