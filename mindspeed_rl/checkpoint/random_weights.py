"""Random weights in place of a checkpoint's, equal in every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weight_layouts.base import ShardLayout, pieces_of

INIT_STD = 0.02  # the usual initializer_range of a config.json
_BLOCK_ROWS = 256  # drawn at one time


@torch.no_grad()
def draw_weights(
    layout: ShardLayout, rank: int, params: Mapping[str, torch.Tensor], seed: int
) -> None:
    """Fill this rank's parameters with random numbers. Local.

    Matrices are drawn from N(0, 0.02); weights of norms are 1, biases and padding rows 0. A number
    depends on ``seed``, the name of its HF tensor and its place in it, and not on the layout.

    Args:
        layout: Layout that says what this rank holds.
        rank: Global rank.
        params: Local parameters by name; written in place, cast to their dtype.
        seed: Seed of all tensors.
    """
    for param in params.values():
        param.zero_()
    for shard in pieces_of(layout, rank):
        piece = shard.piece
        target = piece.view.of(params[piece.param])[piece.param_box.slices]
        shape = layout.hf_shapes[piece.hf_name]
        if len(shape) == 1:
            target.fill_(1.0 if piece.hf_name.endswith(".weight") else 0.0)
        else:
            _draw(target, piece.hf_name, shape, piece.hf_box, seed)


def _draw(target: torch.Tensor, name: str, shape: tuple[int, ...], box: Box, seed: int) -> None:
    """Draw the blocks of rows that a rectangle of a tensor touches, and copy its part of each."""
    rows, *columns = box.slices
    generator = torch.Generator()
    for start in range(rows.start // _BLOCK_ROWS * _BLOCK_ROWS, rows.stop, _BLOCK_ROWS):
        key = hashlib.blake2b(f"{seed}/{name}/{start}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(key, "little") >> 1)
        stop = min(start + _BLOCK_ROWS, shape[0])
        block = torch.empty(stop - start, *shape[1:]).normal_(0.0, INIT_STD, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        wanted = (slice(first - start, last - start), *columns)
        target[first - rows.start : last - rows.start].copy_(block[wanted])
