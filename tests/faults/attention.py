"""Faults in attention over packed rows and over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.planting import Fault, gives, takes

_ROWS = "tests/unit/attention/test_rows.py::"
_KERNELS = "tests/unit/attention/test_kernels.py::"
_OLDER = _KERNELS + "test_flash_attention_without_groups_attends_as_the_general_kernel"
_RING = _ROWS + "test_the_blocks_of_a_ring_add_up_to_the_row[2]"


def _mean(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(out: Any, lse: Any, more: Any, more_lse: Any) -> Any:
        mean = (out + more) / 2
        _, total = original(out, lse, more, more_lse)
        return mean, total

    return changed


def _causal_blocks(pieces: Any) -> Any:
    return tuple(replace(block, causal=True) for block in pieces)


def _full_own_block(pieces: Any) -> Any:
    return (replace(pieces[0], causal=False), *pieces[1:])


ATTENTION: tuple[Fault, ...] = (
    Fault("ring-merges-without-log-sum-exp", "mindspeed_rl.attention.ring:merged", _mean, _RING,
          "Every rank's keys would weigh the same, whatever their scores."),
    Fault("ring-sees-later-keys", "mindspeed_rl.attention.rows:ring_pieces",
          gives(_full_own_block), _RING,
          "Tokens would see those that come after them."),
    Fault("ring-hides-earlier-keys", "mindspeed_rl.attention.rows:ring_pieces",
          gives(_causal_blocks), _RING,
          "Tokens would not see all that stands before them on other ranks."),
    Fault("ulysses-takes-ranks-in-another-order", "mindspeed_rl.attention.rows:_places",
          takes(ranks=lambda ranks: ranks[::-1]),
          _ROWS + "test_exchanged_tokens_are_put_in_the_order_of_their_row[a2a-4]",
          "Tokens of one rank would be read as those of another."),
    Fault("fused-kernels-see-later-keys", "mindspeed_rl.attention.packed_plan:packed_plan",
          takes(pieces=lambda pieces: replace(pieces, causal=False)),
          _KERNELS + "test_a_fused_kernel_attends_as_the_general_one[varlen-alone-grouped]",
          "On devices tokens would see those that come after them."),
    Fault("flash-attention-mixes-groups", "mindspeed_rl.attention.varlen:_repeated",
          lambda original: lambda x, queries: x.repeat(1, queries.size(1) // x.size(1), 1),
          _OLDER + "[alone-grouped]",
          "With torch 2.11 queries would attend to the keys of other groups."),
    Fault("flash-attention-sums-other-copies", "mindspeed_rl.attention.varlen:_summed",
          lambda original: lambda grad, heads: grad if grad.size(1) == heads else
          grad.view(grad.size(0), -1, heads, grad.size(2)).sum(1),
          _OLDER + "[alone-grouped]",
          "With torch 2.11 keys would be trained by the queries of other groups."),
    Fault("npu-statistics-in-the-order-of-their-shape", "mindspeed_rl.attention.tnd:_stored",
          lambda original: lambda *given: _by_shape(original(*given)),
          _KERNELS + "test_a_fused_kernel_computes_the_blocks_of_a_ring[tnd-0-grouped]",
          "Parts of a ring would be merged by the statistics of other heads."),
    Fault("npu-calls-in-another-order", "mindspeed_rl.attention.tnd:_joined",
          takes(parts=lambda parts: parts[::-1]),
          _KERNELS + "test_more_pieces_than_the_npu_takes_are_several_calls[1-alone]",
          "Sequences of a row with many of them would have the attention of others."),
)  # fmt: skip


def _by_shape(stored: Any) -> Any:
    return stored.flatten().sort().values.view(stored.shape)
