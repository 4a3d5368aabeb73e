"""Whole rows of HF tensors, each of them the business of one rank, in rounds of bounded memory.

A rank that writes files receives the rows of its files from the ranks that hold them; a rank that
reads files sends the rows that it has read to the ranks of its node that need them. Both are rounds
of the same kind, which differ in the direction of the messages only. Rounds are a pure function of
the layout and of what each rank has to write or read, so all ranks agree without communication.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mindspeed_rl.core.boxes import PLAIN, Box
from mindspeed_rl.weight_layouts.base import Piece, ShardLayout
from mindspeed_rl.weights.exchange import RankMessages, Round
from mindspeed_rl.weights.planner import Cell, Place, Rectangle, Transfer, cells_of

ROUNDS_IN_FLIGHT = 2
_BUFFERS_OF_A_ROUND = 3  # what is sent, what is received, and the whole rows


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Consecutive rows of a tensor that one rank writes or reads.

    Attributes:
        hf_name: HF tensor.
        box: The rows; whole in all dimensions but the first.
        dtype: Element type on the wire, as torch spells it.
        num_bytes: Size of the rows.
    """

    hf_name: str
    box: Box
    dtype: str
    num_bytes: int

    @property
    def key(self) -> str:
        """Name of the buffer of the rows."""
        return f"{self.hf_name}@{self.box.lo[0]}"


@dataclass(frozen=True, slots=True)
class RowPart:
    """A rectangle of a slice that travels between the rank with the rows and another one.

    Attributes:
        other: The rank that holds the rectangle as a parameter; it may be the rank with the rows.
        box: Rectangle of the HF tensor.
        piece: Place of the parameter; of another tensor that is placed alike where ranks differ.
    """

    other: int
    box: Box
    piece: Piece


# The parts of a slice of one rank: what it receives to write, or what it sends of what it read.
PartsOf = Callable[[int, RowSlice], Sequence[RowPart]]
# The slices of each rank in one round; all of them have the same element type.
RoundSlices = Mapping[int, Sequence[RowSlice]]


def slice_bytes(buffer_bytes: int) -> int:
    """Return the most bytes that a rank has of one kind in one round; see :func:`in_rounds`."""
    return buffer_bytes // (ROUNDS_IN_FLIGHT * _BUFFERS_OF_A_ROUND)


def row_slices(
    hf_name: str, whole: Box, dtype: str, item_bytes: int, most_bytes: int
) -> list[RowSlice]:
    """Cut rows into slices of at most ``most_bytes``, or of one row where that is more. Pure.

    Args:
        hf_name: HF tensor.
        whole: The rows, which are whole in all dimensions but the first.
        dtype: Element type, as torch spells it.
        item_bytes: Bytes of an element.
        most_bytes: Bytes of a slice.
    """
    row_bytes = prod(whole.size[1:]) * item_bytes
    rows = max(1, most_bytes // max(1, row_bytes))
    first, last = whole.lo[0], whole.lo[0] + whole.size[0]
    return [
        RowSlice(hf_name, whole.with_dim(0, start, count), dtype, count * row_bytes)
        for start in range(first, last, rows)
        for count in [min(rows, last - start)]
    ]


def in_rounds(
    queues: Mapping[int, Iterable[RowSlice]], parts_of: PartsOf, most_bytes: int
) -> list[RoundSlices]:
    """Distribute the slices of all ranks over rounds. Pure.

    In each round no rank has more than ``most_bytes`` of rows to write or read, none receives more
    and none sends more. The rank with the most bytes left goes first; one larger slice alone, or
    one whose copies are larger, is a round with nothing else of the ranks that it concerns.

    Args:
        queues: Slices of each rank, in order.
        parts_of: What travels for a slice.
        most_bytes: The bound.
    """
    dtypes = dict.fromkeys(item.dtype for queue in queues.values() for item in queue)
    found: list[RoundSlices] = []
    for dtype in dtypes:
        left = {rank: deque(s for s in queue if s.dtype == dtype) for rank, queue in queues.items()}
        found += _rounds_of_type({r: q for r, q in left.items() if q}, parts_of, most_bytes)
    return found


def _rounds_of_type(
    left: dict[int, deque[RowSlice]], parts_of: PartsOf, most_bytes: int
) -> Iterator[RoundSlices]:
    remaining = {rank: sum(s.num_bytes for s in queue) for rank, queue in left.items()}
    while left:
        taken: dict[int, list[RowSlice]] = {}
        load: Counter[tuple[str, int]] = Counter()
        for rank in sorted(left, key=lambda r: (-remaining[r], r)):
            queue = left[rank]
            while queue:
                adds = _loads(rank, queue[0], parts_of(rank, queue[0]))
                if any(load[key] and load[key] + size > most_bytes for key, size in adds.items()):
                    break
                load.update(adds)
                remaining[rank] -= queue[0].num_bytes
                taken.setdefault(rank, []).append(queue.popleft())
        left = {rank: queue for rank, queue in left.items() if queue}
        yield taken


def _loads(rank: int, rows: RowSlice, parts: Sequence[RowPart]) -> Counter[tuple[str, int]]:
    """Return the bytes that a slice adds to the rows of its rank, and to the messages of others.

    The rank with the rows is one end of every message, so messages in its own direction count
    together with the rows.
    """
    item_bytes = rows.num_bytes // rows.box.num_elements
    adds: Counter[tuple[str, int]] = Counter({("rows", rank): rows.num_bytes})
    for part in parts:
        if part.other != rank:
            size = part.box.num_elements * item_bytes
            adds["wire", part.other] += size
            adds["rows' wire", rank] += size
    return adds


class Gathering:
    """What ranks that write files receive: every element of a slice once.

    Args:
        layout: Layout of the trainer.
        ranks_per_node: Number of ranks per node; a holder on the writer's node is preferred.
    """

    def __init__(self, layout: ShardLayout, ranks_per_node: int) -> None:
        self._layout, self._ranks_per_node = layout, ranks_per_node
        self._cells: dict[str, list[Cell]] = {}

    def parts_of(self, rank: int, rows: RowSlice) -> list[RowPart]:
        """Return the parts of a slice that ``rank`` writes, each with the rank that sends it."""
        cells = self._cells.get(rows.hf_name)
        if cells is None:
            self._cells = {rows.hf_name: (cells := cells_of(self._layout, rows.hf_name))}
        found = []
        for cell in cells:
            if common := cell.box.intersect(rows.box):
                sender = nearest(cell.owner_ranks, rank, self._ranks_per_node)
                found.append(RowPart(sender, common, cell.piece_of(sender)))
        return found


class Scattering:
    """What ranks that read files send: each rectangle to every rank of the node that keeps it.

    Args:
        layout: Layout of the trainer.
        ranks: Ranks of the node.
    """

    def __init__(self, layout: ShardLayout, ranks: range) -> None:
        self._layout, self._ranks = layout, ranks

    def parts_of(self, rank: int, rows: RowSlice) -> list[RowPart]:
        """Return the parts of a slice that ``rank`` has read, each with a rank that keeps it."""
        return [
            RowPart(other, common, shard.piece)
            for shard in self._layout.shards(rows.hf_name)
            if (common := shard.piece.hf_box.intersect(rows.box))
            for other in within(shard.owner_ranks, self._ranks)
        ]


def nearest(owners: Sequence[range], rank: int, ranks_per_node: int) -> int:
    """Return the rank that sends to ``rank``: itself, else one of its node, else any. Pure.

    Among several it is the one at the receiver's place, so that receivers have different senders.
    """
    if any(rank in several for several in owners):
        return rank
    first = rank // ranks_per_node * ranks_per_node
    node = range(first, first + ranks_per_node)
    near = [r for several in owners for r in within(several, node)]
    if near:
        return near[rank % len(near)]
    several = owners[rank % len(owners)]
    return several[rank // len(owners) % len(several)]


def within(owners: range, ranks: range) -> range:
    """Return the part of an ascending progression that lies in consecutive ranks. Pure."""
    first = max(0, -(-(ranks.start - owners.start) // owners.step))
    last = max(first, -(-(ranks.stop - owners.start) // owners.step))
    return owners[first:last]


def messages_of(rank: int, slices: RoundSlices, parts_of: PartsOf, *, gathers: bool) -> Round:
    """Return what one rank sends, receives and copies in a round. Pure.

    Args:
        rank: The rank.
        slices: Slices of all ranks in the round.
        parts_of: What travels for a slice.
        gathers: Whether rows are put together from parameters, to be written; else parameters are
            filled from rows.
    """
    sends: dict[int, list[Transfer]] = {}
    receives: dict[int, list[Transfer]] = {}
    copies: list[Transfer] = []
    dtype = next(iter(slices.values()))[0].dtype
    for holder, several in slices.items():
        for rows in several:
            for part in parts_of(holder, rows):
                if rank not in (holder, part.other):
                    continue
                transfer = _transfer(rank, holder, rows, part, gathers)
                if transfer.src_rank == transfer.dst_rank:
                    copies.append(transfer)
                elif transfer.src_rank == rank:
                    sends.setdefault(transfer.dst_rank, []).append(transfer)
                else:
                    receives.setdefault(transfer.src_rank, []).append(transfer)
    sent, received = (
        {peer: tuple(of_peers[peer]) for peer in sorted(of_peers)} for of_peers in (sends, receives)
    )
    return Round((RankMessages(sent, received),), tuple(copies), (), (), dtype)


def _transfer(rank: int, holder: int, rows: RowSlice, part: RowPart, gathers: bool) -> Transfer:
    piece = part.piece
    inside = Place(part.box.moved(rows.box, Box.whole(rows.box.size)), PLAIN)
    where = Place(part.box.moved(piece.hf_box, piece.param_box), piece.view)
    buffer = (rows.key,) if rank == holder else ()
    param = (piece.param,) if rank == part.other else ()
    if gathers:
        ends = part.other, holder
        return Transfer(*ends, rows.hf_name, Rectangle(part.box, where, inside), param, buffer)
    ends = holder, part.other
    return Transfer(*ends, rows.hf_name, Rectangle(part.box, inside, where), buffer, param)
