"""Exponential noise for sampling, as a function of a request's seed and of how often it has drawn.

vLLM-Ascend draws the noise of each request by a call of its own, which takes about seven kernels,
so that the launches of a step grow with its requests. Here a step takes nine kernels for all.
None of them shifts integers, which an Atlas A2 or A3 does on its AICPU.

The noise of row i and token v is -log(1 - U), with U = |((c_v ^ a_i) b_i ^ d_v) e_i| / 2^31 in
products of 32-bit integers that wrap around. The keys a, b, e of a row are a hash of seed and draw;
c and d are random constants of a token. a, b, e are odd and c, d even, so U is an odd multiple of
2^-31 and never 0. Statistics are tested in ``tests/unit/algorithms/test_sampling_noise.py``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

_KEYS = 3
_TABLE_SEED = 20  # of the constants of tokens
# fp32 rounds the largest integers up to 2^31, which would give infinite noise; smaller ones keep
# their noise.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)


def draw_keys(seeds: Sequence[int], draws: Sequence[int]) -> torch.Tensor:
    """Return the keys of the rows of a batch, by seed and number of the draw: [3, n, 1] int32."""
    digests = (
        hashlib.blake2b(struct.pack("<2Q", seed, draw), digest_size=4 * _KEYS).digest()
        for seed, draw in zip(seeds, draws, strict=True)
    )
    words = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32)
    return (words.view(-1, _KEYS).T.contiguous() | 1).unsqueeze(-1)


@lru_cache(maxsize=8)
def _token_constants(size: int, device: torch.device) -> torch.Tensor:
    """Return the constants of the first tokens: [2, size] int32, even."""
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    drawn = torch.randint(-(2**30), 2**30, (2, size), generator=generator, dtype=torch.int32)
    return (drawn * 2).to(device)


def exponential_noise(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return noise of the standard exponential distribution: [n, size] fp32, from 2^-31 to 17.

    Args:
        keys: [3, n, 1] int32, see :func:`draw_keys`, on the device of the noise.
        size: Number of tokens.
    """
    first, second = _token_constants(size, keys.device)
    a, b, e = keys
    bits = torch.bitwise_xor(first, a).mul_(b).bitwise_xor_(second).mul_(e)
    return bits.float().abs_().mul_(-_TO_UNIT).log1p_().neg_()
