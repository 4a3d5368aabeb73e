"""Packed rows: what attention needs to know of one, and attention itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed_rl.attention.context import ContextGroup
from mindspeed_rl.attention.exchange import gather_keys, heads_for_tokens, tokens_for_heads
from mindspeed_rl.attention.kernels import AttentionPlan, Planner
from mindspeed_rl.attention.padded_sdpa import padded_plan
from mindspeed_rl.attention.pieces import Pieces, gathered_pieces, ring_pieces
from mindspeed_rl.attention.ring import ring_attention
from mindspeed_rl.samples.packing import context_index


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The borders of a packed micro-batch; passed to megatron-core as ``packed_seq_params``.

    Attributes:
        positions: [T] int32, position of each token of this rank within its own sequence.
        blocks: Plans of the kernel: one, or where keys travel around a ring one each for own keys,
            those of earlier ranks and those of later ranks.
        context: Ranks that share the row.
        arrival: [u T] int32, where each token is among those that u ranks exchange for heads;
            ``None``: they exchange none.
        departure: [u T] int32, the inverse of ``arrival``.
        qkv_format: Tells megatron-core not to cut the row itself.
        cp_group: Read by megatron-core; ``None``: it keeps its own group, whatever shares the row.
        local_cp_size: Read by megatron-core, as ``cp_group`` is; ``None``: likewise.
    """

    positions: torch.Tensor
    blocks: tuple[AttentionPlan, ...]
    context: ContextGroup = field(default_factory=ContextGroup)
    arrival: torch.Tensor | None = None
    departure: torch.Tensor | None = None
    qkv_format: str = "sbhd"
    cp_group: Any = None
    local_cp_size: int | None = None

    def to(self, device: torch.device) -> PackedRow:
        """Move the row to a device."""
        if device.type == "cpu":
            return self
        arrival, departure = (
            None if x is None else x.to(device) for x in (self.arrival, self.departure)
        )
        return replace(
            self,
            positions=self.positions.to(device),
            blocks=tuple(block.to(device) for block in self.blocks),
            arrival=arrival,
            departure=departure,
        )


def make_packed_row(
    lengths: Sequence[int],
    positions: torch.Tensor,
    context: ContextGroup | None = None,
    plan: Planner = padded_plan,
) -> PackedRow:
    """Prepare the attention of a packed row. Local.

    Args:
        lengths: Tokens of each sequence in order, multiples of twice the ranks that share the row
            if these are several; the rest of the row is padding.
        positions: [T] int32, positions of this rank's tokens.
        context: Ranks that share the row; ``None``: this one alone.
        plan: Prepares the kernel of the platform.
    """
    context = context or ContextGroup()
    local = int(positions.numel())
    if context.gathers:
        everyone = range(context.size)
        places = _places(lengths, local, context, everyone, torch.arange(context.size * local))
        table = gathered_pieces(lengths, context.size, context.rank)
        return PackedRow(positions, (plan(Pieces(table, local, places=places)),), context)
    tokens = local * context.ulysses
    blocks = tuple(plan(p) for p in ring_pieces(lengths, context.ring_size, tokens))
    if context.ulysses == 1:
        return PackedRow(positions, blocks, context)
    arrival = _places(lengths, local, context, context.block, _share(lengths, local, context))
    departure = torch.empty_like(arrival)
    departure[arrival] = torch.arange(tokens, dtype=torch.int32)
    return PackedRow(positions, blocks, context, arrival, departure)


def _share(lengths: Sequence[int], local: int, context: ContextGroup) -> torch.Tensor:
    """Return the positions in the whole row of the tokens of this rank's block, in their order."""
    if context.ring_size == 1:
        return torch.arange(context.size * local)
    return context_index(lengths, context.size * local, context.ring_size, context.ring_rank)


def _places(
    lengths: Sequence[int],
    local: int,
    context: ContextGroup,
    ranks: Sequence[int],
    wanted: torch.Tensor,
) -> torch.Tensor:
    """Return where tokens of the row are among those of some ranks, rank after rank, int32."""
    total = context.size * local
    index = torch.cat([context_index(lengths, total, context.size, rank) for rank in ranks])
    place = torch.empty(total, dtype=torch.int32)
    place[index] = torch.arange(index.numel(), dtype=torch.int32)
    return place[wanted]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: PackedRow,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend within each sequence of a row, causally. Collective: the ranks that share the row.

    Args:
        q: [T, n, d], tokens of this rank.
        k: [T, m, d], with m a divisor of n.
        v: [T, m, dv].
        row: Borders of the row.
        scale: Factor of the scores; ``None``: 1 / sqrt(d).
        dropout: Share of the weights that are dropped; a ring drops none.

    Returns:
        [T, n, dv], zero at padding.
    """
    context = row.context
    if context.gathers:
        k, v = gather_keys(k, v, context)
    if row.arrival is not None:
        q, k, v = tokens_for_heads(q, k, v, context, row.arrival)
    if context.ring_size > 1:
        out = ring_attention(q, k, v, row.blocks, context, scale)
    else:
        out = row.blocks[0].attend(q, k, v, scale, dropout)
    if row.departure is not None:
        out = heads_for_tokens(out, context, row.departure)
    return out
