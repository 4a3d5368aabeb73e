"""Floating-point operations of a model's forward pass."""

from __future__ import annotations

from collections import Counter
from functools import cache

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.models.tensors import tensor_groups


def active_parameters(spec: ModelSpec) -> int:
    """Number of weights that one token is multiplied with: of experts, ``top_k`` of each layer."""
    return sum(active_by_part(spec).values())


def active_by_part(spec: ModelSpec) -> Counter[str]:
    """Number of active parameters by the part that recomputation names; the rest is ``other``."""
    experts = {
        row.param
        for row in weight_table(spec.family).trainer_rows(spec)
        if isinstance(row, ExpertRow)
    }
    active: Counter[str] = Counter()
    for group in tensor_groups(spec):
        count = group.num_parameters
        if group.row in experts:
            moe = spec.layer(group.layers[0]).moe
            assert moe is not None, f"{group.row} in a layer without experts"
            active["moe"] += count * moe.top_k // moe.num_experts
        elif ".shared_experts." in group.row or ".router." in group.row:
            active["moe"] += count
        else:
            active["mlp" if ".mlp." in group.row else "other"] += count
    if not spec.tie_embeddings:  # a tied embedding is the head as well
        active["other"] -= spec.vocab_size * spec.hidden_size  # the embedding is looked up
    return active


def attention_flops(spec: ModelSpec, mean_length: float) -> float:
    """Forward operations of one token's attention, which on average covers half of the sequence."""
    return sum(layer.attention.pair_flops for layer in spec.layers) * mean_length / 2


@cache
def sequence_flops(spec: ModelSpec) -> tuple[float, float]:
    """Operations of a sequence's forward pass: per token, and per squared token (attention)."""
    return 2.0 * active_parameters(spec), attention_flops(spec, 1.0)
