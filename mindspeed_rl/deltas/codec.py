"""A lossless code for the changes of words: where they are, and by how much.

After an optimizer step most words of bf16 weights are what they were, and nearly all others moved
to a neighbouring number: as integers, their bits differ by one. A piece of a message is therefore
coded as four lists:

- gaps between changed words, as a Golomb-Rice code: ``gap >> shift`` in unary, the lowest ``shift``
  bits as they are. The shift of each piece is the one that makes it shortest. For changes that are
  independent of each other this is within a few percent of the entropy; with a shift of 0 it is
  the bitmap of the piece;
- one bit per changed word: whether its integer went up or down;
- gaps, among changed words, between those that moved by more than one, in the same code;
- how far these moved, as an Elias gamma code: how many bits, in unary, and then the bits.

All differences are between integers modulo the number of words there are, so every bit pattern is
exact, those of NaN, infinity and -0.0 included. A piece whose code would not be shorter than its
words travels as its words.

A piece has a :class:`PieceHead` of six integers, from which alone both ends compute how long the
coded piece is. Heads travel first, each with its CRC-32, so that every rank knows the size of each
message it takes part in, and that it knows it.

Comparisons, shifts, prefix sums, gathers and scatters of whole pieces are used, of int16, int64 and
uint8, which a host and CUDA have. No kernel for the AI Cores of an NPU is known for several of them
(shifts, prefix sums and positions of int64, comparisons and gathers of int16, sums of uint8); its
slow processor would run them, so that ``--reshard-deltas`` is refused there.

A Golomb-Rice code is described in S. W. Golomb, "Run-length encodings", IEEE Transactions on
Information Theory 12 (1966); the gamma code in P. Elias, "Universal codeword sets and
representations of the integers", same journal, 21 (1975).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from math import log2

import torch

# Words of one piece: few enough to bound what coding allocates, and for one shift to fit them all.
PIECE_WORDS = 1 << 20
# A piece with a greater share of changed words is not coded: little could be saved.
MOST_CHANGED = 0.75

HEAD_INTS = 7
HEAD_BYTES = 4 * HEAD_INTS
_ALIGNMENT = 4  # bytes, of words of 32 bits
_PLAIN = -1  # in place of the number of changed words


class DamagedMessageError(RuntimeError):
    """A head or a code is none that :func:`encode` returns for such a piece."""


@dataclass(frozen=True, slots=True)
class PieceHead:
    """What both ends know of a coded piece before it travels.

    Attributes:
        changed: Number of words that changed; -1: the piece travels as its words.
        far: Number of changed words that moved by more than one.
        shifts: Low bits of a gap between changed words; 32 times those of a gap between far ones.
        gap_bits: Length of the unary parts of the gaps between changed words.
        far_bits: The same of the gaps between far ones.
        class_bits: Length of the unary parts of how far these moved.
    """

    changed: int
    far: int = 0
    shifts: int = 0
    gap_bits: int = 0
    far_bits: int = 0
    class_bits: int = 0

    def row(self) -> tuple[int, ...]:
        """Return the integers that travel: those of the head and their CRC-32."""
        numbers = astuple(self)
        return *numbers, _crc(numbers)

    @classmethod
    def of_row(cls, row: Sequence[int], num_words: int) -> PieceHead:
        """Return the head that travelled, of a piece of so many words.

        Raises:
            DamagedMessageError: It is not what was sent, or no piece of so many words can have it.
        """
        *numbers, crc = row
        if crc != _crc(numbers):
            raise DamagedMessageError(f"the head {tuple(numbers)} arrived with the CRC-32 {crc}")
        head = cls(*numbers)
        head.check(num_words)
        return head

    @property
    def is_plain(self) -> bool:
        return self.changed == _PLAIN

    def sections(self) -> tuple[int, ...]:
        """Return the bits of each part of the code, in order."""
        far_shift, shift = divmod(self.shifts, 32)
        return (
            self.changed * shift,
            self.changed,
            self.far * far_shift,
            self.gap_bits,
            self.far_bits,
            self.class_bits,
            self.class_bits - self.far,
        )

    def num_bytes(self, num_words: int, word_bytes: int) -> int:
        """Return the size of the piece on the wire, a multiple of four. Pure."""
        size = num_words * word_bytes if self.is_plain else -(-sum(self.sections()) // 8)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def check(self, num_words: int) -> None:
        """Refuse a head that no piece of so many words can have.

        Raises:
            DamagedMessageError: A number is out of its range.
        """
        possible = self.is_plain or (
            0 <= self.far <= self.changed <= num_words
            and 0 <= self.shifts < 1024  # two numbers of five bits
            and self.changed <= self.gap_bits <= self.changed + num_words
            and self.far <= self.far_bits <= self.far + num_words
            and self.far <= self.class_bits <= 32 * self.far
        )
        if not possible:
            raise DamagedMessageError(
                f"{self} is not the head of a piece of {num_words} words; the ranks run different "
                "versions of mindspeed_rl, or the message was damaged"
            )


def _crc(numbers: Sequence[int]) -> int:
    """Return the CRC-32 of integers of 32 bits, as such an integer with sign."""
    packed = struct.pack(f"<{len(numbers)}i", *numbers)
    return int.from_bytes(zlib.crc32(packed).to_bytes(4, "little"), "little", signed=True)


def pieces_of(num_words: int) -> list[int]:
    """Return the numbers of words of the pieces that a message is cut into."""
    full, rest = divmod(num_words, PIECE_WORDS)
    return [PIECE_WORDS] * full + ([rest] if rest else [])


def encode(old: torch.Tensor, new: torch.Tensor) -> tuple[PieceHead, torch.Tensor]:
    """Code a piece by what it has changed. Local.

    Args:
        old: [words] int16 or int32, contiguous: what the receiver holds.
        new: The same, what it has to hold.

    Returns:
        The head, and ``head.num_bytes`` bytes, [bytes] uint8.
    """
    where = (old != new).nonzero().flatten()
    changed, num_words = len(where), len(new)
    if changed > MOST_CHANGED * num_words:
        return PieceHead(_PLAIN), _plain(new)
    if not changed:
        return PieceHead(0), new.new_empty(0, dtype=torch.uint8)
    moved = _wrapped(new[where].long() - old[where].long(), new.dtype)
    distance = moved.abs()
    far = (distance > 1).nonzero().flatten()
    gaps, far_gaps = _gaps(where), _gaps(far)
    shift, far_shift = _best_shift(gaps, num_words), _best_shift(far_gaps, changed)
    beyond = distance[far] - 1
    classes = _floor_log2(beyond)
    unary = [_unary(part) for part in (gaps >> shift, far_gaps >> far_shift, classes)]
    parts = [
        _fields(gaps, shift),
        (moved < 0).to(torch.uint8),
        _fields(far_gaps, far_shift),
        *unary,
        _fields_of_widths(beyond, classes, _class_bits(new.dtype)),
    ]
    head = PieceHead(changed, len(far), shift + 32 * far_shift, *(len(part) for part in unary))
    if head.num_bytes(num_words, new.element_size()) >= new.nbytes:
        return PieceHead(_PLAIN), _plain(new)
    return head, _to_bytes(parts)


def decode(head: PieceHead, code: torch.Tensor, words: torch.Tensor) -> None:
    """Bring a piece to what its sender coded, in place. Local.

    Args:
        head: PieceHead of the piece.
        code: [head.num_bytes] uint8.
        words: [words] int16 or int32, contiguous: what the sender coded against.

    Raises:
        DamagedMessageError: The head cannot be that of such a piece, or the code has other lengths
            or names places that the piece does not have. The words are as they were.
    """
    head.check(len(words))
    if head.is_plain:
        words.copy_(code[: words.nbytes].view(words.dtype))
        return
    if not head.changed:
        return
    powers = _powers(8, code.device).to(torch.uint8)
    bits = (code[:, None] >> powers).bitwise_and_(1).flatten()
    sections = head.sections()
    parts = list(torch.split(bits[: sum(sections)], list(sections)))
    far_shift, shift = divmod(head.shifts, 32)
    where = _positions(_counts(parts[3], head.changed), parts[0], shift)
    beyond = [where[-1] - len(words)]  # how far numbers are out of range; read at once below
    if head.far:
        far = _positions(_counts(parts[4], head.far), parts[2], far_shift)
        classes, most = _counts(parts[5], head.far), _class_bits(words.dtype)
        missing = (classes.clamp(max=most).sum() - len(parts[6])).abs()
        beyond += [far[-1] - head.changed, missing - 1]
    if int(torch.stack(beyond).max()) >= 0:
        raise DamagedMessageError("a coded piece names words that it does not have")
    distance = torch.ones_like(where)
    if head.far:
        low = _from_widths(parts[6], classes, most)
        distance[far] = (1 << classes) + low + 1
    moved = torch.where(parts[1].bool(), -distance, distance)
    words[where] = _wrapped(words[where].long() + moved, words.dtype).to(words.dtype)


def _plain(words: torch.Tensor) -> torch.Tensor:
    """Return words as bytes, a multiple of the alignment."""
    code = words.view(torch.uint8)
    missing = -len(code) % _ALIGNMENT
    return torch.cat([code, code.new_zeros(missing)]) if missing else code


def _wrapped(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return integers modulo the number of words, as the integers that words are: int64."""
    half = 1 << (8 * dtype.itemsize - 1)
    return ((numbers + half) & (2 * half - 1)) - half


def _class_bits(dtype: torch.dtype) -> int:
    """Return the most low bits of how far a word moved by more than one."""
    return 8 * dtype.itemsize - 2


def _gaps(where: torch.Tensor) -> torch.Tensor:
    """Return how many others lie before each of some ascending positions: [n] int64."""
    return torch.diff(where, prepend=where.new_full((1,), -1)) - 1


def _best_shift(gaps: torch.Tensor, num_places: int) -> int:
    """Return the number of low bits with which gaps are coded in the fewest bits."""
    count = len(gaps)
    if not count:
        return 0
    most = int(log2(max(1.0, num_places / count))) + 2
    unary = torch.stack([(gaps >> shift).sum() for shift in range(most)]).tolist()
    return min(range(most), key=lambda shift: unary[shift] + shift * count)


def _floor_log2(numbers: torch.Tensor) -> torch.Tensor:
    """Return the number of bits after the first one of positive integers below 2^32."""
    found, rest = torch.zeros_like(numbers), numbers
    for step in (16, 8, 4, 2, 1):
        large = (rest >> step) > 0
        found = found + step * large
        rest = torch.where(large, rest >> step, rest)
    return found


def _unary(counts: torch.Tensor) -> torch.Tensor:
    """Return for each count so many zeros and a one: [sum(counts) + n] uint8."""
    if not len(counts):
        return counts.new_empty(0, dtype=torch.uint8)
    ends = torch.cumsum(counts + 1, 0)
    bits = counts.new_zeros(int(ends[-1]), dtype=torch.uint8)
    bits[ends - 1] = 1
    return bits


def _counts(bits: torch.Tensor, number: int) -> torch.Tensor:
    """Return the counts that :func:`_unary` wrote.

    Raises:
        DamagedMessageError: There are more or fewer than ``number``.
    """
    ends = bits.nonzero().flatten()
    if len(ends) != number:
        raise DamagedMessageError(
            f"a coded piece has {len(ends)} entries where its head says {number}"
        )
    return _gaps(ends)


def _positions(high: torch.Tensor, low: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the positions whose gaps have these unary and low parts."""
    gaps = high << shift
    if shift:
        fields = low.view(-1, shift).long() << _powers(shift, low.device)
        gaps += fields.sum(1)
    return torch.cumsum(gaps + 1, 0) - 1


def _powers(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(width, device=device)


def _fields(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """Return the lowest bits of numbers, the lowest first: [n * width] uint8."""
    bits = (numbers[:, None] >> _powers(width, numbers.device)) & 1
    return bits.to(torch.uint8).flatten()


def _used(widths: torch.Tensor, most: int) -> torch.Tensor:
    """Return which of ``most`` bits a number of each width has: [n, most] bool."""
    return torch.arange(most, device=widths.device, dtype=torch.int32) < widths[:, None].int()


def _fields_of_widths(numbers: torch.Tensor, widths: torch.Tensor, most: int) -> torch.Tensor:
    """Return the lowest ``widths[i]`` bits of number ``i``, one after the other: uint8."""
    bits = numbers[:, None].int() >> torch.arange(most, device=widths.device, dtype=torch.int32)
    return bits[_used(widths, most)].bitwise_and_(1).to(torch.uint8)


def _from_widths(bits: torch.Tensor, widths: torch.Tensor, most: int) -> torch.Tensor:
    """Return the numbers that :func:`_fields_of_widths` wrote: [n] int64."""
    table = torch.zeros(len(widths), most, dtype=torch.int32, device=bits.device)
    table[_used(widths, most)] = bits.int()
    shifts = torch.arange(most, device=bits.device, dtype=torch.int32)
    return (table << shifts).sum(1, dtype=torch.int64)


def _to_bytes(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack bits into bytes, the lowest first, with zeros up to the alignment: uint8."""
    size = sum(len(part) for part in parts)
    padding = parts[0].new_zeros(-size % (8 * _ALIGNMENT))
    bits = torch.cat([*parts, padding]).view(-1, 8)
    # Bits of a byte are distinct, so that their sum is the byte.
    return (bits << _powers(8, bits.device).to(torch.uint8)).sum(1, dtype=torch.uint8)
