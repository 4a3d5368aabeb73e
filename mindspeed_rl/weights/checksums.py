"""A checksum of a tensor's bits that does not depend on how the tensor is cut or ordered.

Elements are taken as words of 32 bits, neighbours of two bytes in pairs. A tensor of k dimensions
has one line of odd random 64-bit weights per dimension, and the weight of a word is the product of
the k weights of its place. The checksum is the sum of word x weight modulo 2^64. It is linear, so
trainer and engine add up what their own pieces give. Devices only multiply and add: shifts of
integers have no kernel on the AI Cores of an Atlas A2 or A3.

What it misses, with D the difference of the words of two tensors and v the number of trailing zero
bits that all of D has in common (at most 31):

- One changed word is always found: D has one entry, less than 2^32 in size, and its weight is odd.
- Of any other fixed D, the weights miss at most a share of (65 - v) 2^(v - 63) in a tensor of up to
  two dimensions: 2^-57 where a lowest bit changed, 2^-27 where only highest bits did.

The second line for a matrix D: take a row r that has an entry with v trailing zeros. Its sum over
columns is uniform over a coset of 2^(v+1), because an odd random weight is 2u + 1 with u uniform,
so it has v + T trailing zeros with P(T >= t) <= 2^(1-t). The sum over rows is 0 modulo 2^64 with
probability at most 2^(v+T-63), by the same argument; its mean over T is at most (65 - v) 2^(v-63).
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch

from mindspeed_rl.core.boxes import Box

_WORD_BYTES = 4
_BITS = {2: torch.int16, 4: torch.int32}
# Words hashed at a time, each of which takes up to 24 bytes with all temporaries: few kernels on a
# device, and on CPU about what its caches hold.
_DEVICE_WORDS, _CPU_WORDS = 1 << 20, 1 << 18


@lru_cache(maxsize=256)
def _line(dim: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first ``count`` weights of a dimension, counted from the last one: [count] int64.

    They are splitmix64 of the position, made odd, computed on the host.
    """
    value = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(dim << 48)
    value *= np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(value.view(np.int64)).to(device)


def _weights(dim: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return weights of consecutive positions in a dimension; lines are kept for later calls."""
    length = 1 << max(10, (first + count - 1).bit_length())
    return _line(dim, length, device)[first : first + count]


def box_checksum(values: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return what one rectangle adds to the checksum of its tensor, using about 24 MB at a time.

    Args:
        values: [box.size], any floating type.
        box: Place of the values in the HF tensor.
        dtype: Element type of two or four bytes that the values are cast to first.

    Returns:
        0-d int64 (modulo 2^64), on the device of the values.
    """
    chunk = _CPU_WORDS if values.device.type == "cpu" else _DEVICE_WORDS
    parts = -(-box.num_elements * dtype.itemsize // (chunk * _WORD_BYTES))
    if parts <= 1:
        return _chunk_checksum(values, box, dtype)
    whole = Box.whole(box.size)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in (box.slice(i, parts) for i in range(parts)):
        if part.num_elements:
            total += _chunk_checksum(values[part.moved(box, whole).slices], part, dtype)
    return total


def _chunk_checksum(values: torch.Tensor, box: Box, dtype: torch.dtype) -> torch.Tensor:
    words, first = _words(values.to(dtype), box.lo[-1])
    total = words
    for dim, lo in enumerate((first, *box.lo[-2::-1])):
        total = (total * _weights(dim, lo, total.shape[-1], values.device)).sum(-1)
    return total


def _words(values: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """Return the words of values whose last dimension begins at ``first``, and the first's place.

    Zeros stand for elements that share a word with one of these; they add nothing.
    """
    per_word = _WORD_BYTES // values.element_size()
    bits = values.contiguous().view(_BITS[values.element_size()])
    before, count = first % per_word, bits.shape[-1]
    width = -(-(before + count) // per_word)
    if width * per_word == count and bits.storage_offset() % per_word == 0:
        words = bits.flatten().view(torch.int32).reshape(*bits.shape[:-1], width)
    else:
        words = bits.new_zeros((*bits.shape[:-1], width), dtype=torch.int32)
        words.view(bits.dtype)[..., before : before + count] = bits
    return words, first // per_word


@cache
def check_arithmetic(device: torch.device) -> None:
    """Compare the checksum of a small matrix on a device with that of the CPU, once. Local.

    Integers of 64 bits have to wrap around, which no documentation of a device promises.

    Raises:
        RuntimeError: They differ.
    """
    values = torch.arange(1, 36, dtype=torch.float32).reshape(5, 7)
    box = Box.whole((5, 7))
    expected = int(box_checksum(values, box, torch.bfloat16))
    found = int(box_checksum(values.to(device), box, torch.bfloat16))
    if found != expected:
        raise RuntimeError(
            f"the checksum of a matrix is {found} on {device} and {expected} on the CPU: its "
            "products or sums of 64-bit integers are not modulo 2^64, so no weights can be proven "
            "equal there"
        )
