"""Which queries of a rank attend to which keys, as plain numbers.

A piece is a run of consecutive queries that attends to a run of consecutive keys. Under context
parallelism a rank holds two of ``2 cp`` chunks of every sequence (zigzag, see
:func:`~mindspeed_rl.samples.packing.context_index`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

# Columns of a table of pieces.
QUERY, KEY, NUM_QUERIES, NUM_KEYS = range(4)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of attention that one call of a kernel computes.

    Attributes:
        table: [pieces, 4] int64: first query, first key, number of queries, number of keys.
        num_tokens: T, the tokens of this rank; those of no piece are padding.
        causal: Whether the queries are the last tokens among their keys, and each sees no key
            behind itself (causal from the lower right corner); otherwise they see all keys.
        places: [keys] int32, where the key of each position is stored; ``None``: in order.
    """

    table: NDArray[np.int64]
    num_tokens: int
    causal: bool = True
    places: torch.Tensor | None = None


def gathered_pieces(lengths: Sequence[int], cp: int, rank: int) -> NDArray[np.int64]:
    """Return the pieces of a rank that has the keys of the whole row.

    These are one per sequence, or two chunks each under context parallelism, which attend to the
    part of their sequence that ends with them.

    Args:
        lengths: Tokens of each sequence, multiples of ``2 cp`` if that is above 2.
        cp: Context-parallel size.
        rank: Position in the group.
    """
    length = np.asarray(lengths, dtype=np.int64)
    start = length.cumsum() - length
    if cp == 1:
        found = np.stack([start, start, length, length], axis=1)
    else:
        chunk = length // (2 * cp)
        local = 2 * (chunk.cumsum() - chunk)
        early = np.stack([local, start, chunk, (rank + 1) * chunk], axis=1)
        late = np.stack([local + chunk, start, chunk, (2 * cp - rank) * chunk], axis=1)
        found = np.stack([early, late], axis=1).reshape(-1, 4)
    return found[found[:, NUM_QUERIES] > 0]


def ring_pieces(lengths: Sequence[int], ring_size: int, num_tokens: int) -> tuple[Pieces, ...]:
    """Return what a rank attends to among its own keys, those of earlier and of later ranks.

    Rank ``i`` of ``r`` has the chunks ``i`` and ``2 r - 1 - i`` of every sequence. Of an earlier
    rank it sees the first chunk with all queries; of a later one both chunks with the queries of
    its second chunk.

    Args:
        lengths: Tokens of each sequence, multiples of ``2 ring_size``.
        ring_size: Number of ranks r around which keys travel; with 1 there are only own keys.
        num_tokens: Tokens of this rank.
    """
    length = np.asarray(lengths, dtype=np.int64) // ring_size
    start = length.cumsum() - length
    half = length // 2

    def pieces(*columns: NDArray[np.int64], causal: bool) -> Pieces:
        table = np.stack(columns, axis=1)
        return Pieces(table[table[:, NUM_QUERIES] > 0], num_tokens, causal)

    own = pieces(start, start, length, length, causal=True)
    if ring_size == 1:
        return (own,)
    earlier = pieces(start, start, length, half, causal=False)
    later = pieces(start + half, start, half, length, causal=False)
    return own, earlier, later
