"""Floating-point operations of a model's passes.

A forward pass takes 2 N operations per token, with N the weights that the token is multiplied with,
and per layer 2 h (d_k + d_v) for each pair of a token and one before it, with h heads of d_k
channels of keys and d_v of values. A backward pass takes twice as many. That is 6 N per token and
attention (Kaplan et al. 2020, arXiv:2001.08361; Chowdhery et al. 2022, arXiv:2204.02311, appendix
B); attention is counted as causal, half of all pairs. As usual, N has the head for
all tokens, although log-probs of prompts are not computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.models.tensors import tensor_groups


def active_parameters(spec: ModelSpec) -> int:
    """Number of weights that one token is multiplied with: of experts, a share in each layer."""
    expert_rows = {
        row.param
        for row in weight_table(spec.family).trainer_rows(spec)
        if isinstance(row, ExpertRow)
    }
    active = 0
    for group in tensor_groups(spec):
        share = spec.layer(group.layers[0]).mlp.active_share if group.row in expert_rows else 1
        active += int(group.num_parameters * share)
    if not spec.tie_embeddings:  # a tied embedding is the head as well
        active -= spec.vocab_size * spec.hidden_size  # the embedding is looked up
    return active


def attention_flops(spec: ModelSpec, mean_length: float) -> float:
    """Forward operations of one token's attention, which on average covers half of the sequence."""
    return sum(layer.attention.pair_flops for layer in spec.layers) * mean_length / 2


def context_values(spec: ModelSpec) -> int:
    """Number of elements of one token's keys and values, in all layers together.

    So many travel to each other rank that shares the token's sequence.
    """
    return sum(layer.attention.context_values for layer in spec.layers)


@cache
def sequence_flops(spec: ModelSpec) -> tuple[float, float]:
    """Operations of a sequence's forward pass: per token, and per squared token (attention)."""
    return 2.0 * active_parameters(spec), attention_flops(spec, 1.0)


def training_flops(spec: ModelSpec, lengths: Iterable[int]) -> float:
    """Operations of one forward and one backward pass over sequences, nothing recomputed.

    Args:
        spec: Model; of experts only those that a token is routed to count.
        lengths: Tokens of each sequence, prompt and response.
    """
    per_token, per_squared = sequence_flops(spec)
    return 3 * sum(n * (per_token + per_squared * n) for n in lengths)
