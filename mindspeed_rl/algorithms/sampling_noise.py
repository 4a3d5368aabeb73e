"""Exponential noise for sampling, as a function of a request's seed and of the position of a token.

An engine that draws the noise of each request by a generator of its own makes a draw (on an NPU
about seven kernels) per request and step, and a request that is moved, preempted or begun again
needs the state of its generator. Here a step draws for all its rows at once, by nine kernels, and
what is drawn for a token depends on nothing but the seed of its request and its position in the
sequence: not on the other requests, the rank, the layout, or how prompts are cut.

The noise of row i and token v is -log(1 - U), with U = |((c_v ^ a_i) b_i ^ d_v) e_i| / 2^31 in
products of 32-bit integers that wrap around. The keys a, b, e of a row are a hash of seed and
position; c and d are random constants of a token. a, b, e are odd and c, d even, so U is an odd
multiple of 2^-31 and never 0. No kernel shifts integers, which an Atlas A2 or A3 does on its AICPU;
the hash shifts, on the host. Statistics are tested in
``tests/unit/algorithms/test_sampling_noise.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_TABLE_SEED = 20  # of the constants of tokens
# fp32 rounds the largest integers up to 2^31, which would give infinite noise; smaller ones keep
# their noise.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)
# Of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), as signed integers.
_GAMMA, _FIRST, _SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Numbers of noise that are held at once; a CPU is fastest where they stay in its cache.
_CHUNK_ON_CPU, _CHUNK = 2**19, 2**24


def draw_keys(
    seeds: Sequence[int] | torch.Tensor, positions: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Return the keys of the rows of a batch, on the host: [3, n, 1] int32.

    Args:
        seeds: [n], the seed of each row's request, 63 bits.
        positions: [n], the position in the sequence, prompt included, of the token to draw.
    """
    seed, position = (torch.as_tensor(x, dtype=torch.int64) for x in (seeds, positions))
    first = _mixed(_mixed(seed) + position * _GAMMA)
    second = _mixed(first + _GAMMA)
    words = torch.stack([first, second]).view(torch.int32).view(2, -1, 2)
    return torch.stack([words[0, :, 0], words[0, :, 1], words[1, :, 0]]).unsqueeze(-1) | 1


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's permutation of 64-bit integers."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return torch.bitwise_xor(x, _shifted(x, 31))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as unsigned integers."""
    shifted: torch.Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


@lru_cache(maxsize=8)
def _token_constants(size: int, device: torch.device) -> torch.Tensor:
    """Return the constants of the first tokens: [2, size] int32, even."""
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    drawn = torch.randint(-(2**30), 2**30, (2, size), generator=generator, dtype=torch.int32)
    return (drawn * 2).to(device)


def exponential_noise(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Return noise of the standard exponential distribution: [n, size] fp32, from 2^-31 to 17.

    It takes 8 bytes per number while it is computed.

    Args:
        keys: [3, n, 1] int32, see :func:`draw_keys`, on the device of the noise.
        size: Number of tokens.
    """
    first, second = _token_constants(size, keys.device)
    a, b, e = keys
    bits = torch.bitwise_xor(first, a).mul_(b).bitwise_xor_(second).mul_(e)
    return bits.float().abs_().mul_(-_TO_UNIT).log1p_().neg_()


def draw_tokens(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token for each row, with its probability: [n] int64 on the device of ``probs``.

    Rows are drawn in chunks, so that the noise takes at most 128 MiB of a device (4 MiB of a CPU)
    or that of one row beside ``probs``, which is overwritten.

    Args:
        probs: [n, tokens] fp32; they need not add up to 1.
        keys: [3, n, 1] int32, see :func:`draw_keys`, on the device of ``probs``.
    """
    count, size = probs.shape
    rows = max(1, (_CHUNK_ON_CPU if probs.device.type == "cpu" else _CHUNK) // size)
    drawn = [
        probs[i : i + rows].div_(exponential_noise(keys[:, i : i + rows], size)).argmax(dim=-1)
        for i in range(0, count, rows)
    ]
    return torch.cat(drawn)
