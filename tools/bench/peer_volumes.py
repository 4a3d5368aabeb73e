"""Closed forms of what the peers' two ways of resharding, and ``stream``, move per rank.

What is counted, everywhere in this folder:

- a broadcast of n bytes over p ranks: n received by each rank but the source; n sent by each rank
  but the last one of the ring that starts at the source (p - 1 sends in all);
- an all-gather of p shards of n bytes: (p - 1) n received and sent by each rank;
- an all-to-all-v: what comes from and goes to other ranks; a rank's own share is no traffic.

Peers move whole local parameters, so the padding of a vocabulary travels too. Tied copies of the
embedding do not travel. Nothing is counted per transfer: the cost is that of the rows of the weight
table times the layers, plus, for ``two-stage``, one look at who needs which expert.

Source of both ways: verl's Megatron weight export, and the DeepSeek-R1 recipe of CANN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil, prod

import numpy as np
import numpy.typing as npt

from bench.trainer_tensors import (
    ITEM_BYTES,
    TrainerTensor,
    num_copies,
    padding_bytes,
    trainer_tensors,
)
from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.resharding.layouts.base import Shard, ShardLayout, expert_name, layer_name
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Volumes:
    """What a way of resharding costs.

    Attributes:
        recv_bytes: by rank, over the wire.
        send_bytes: by rank.
        critical_bytes: sum over the steps that follow each other of the largest max(sent, received)
            of any rank.
        peak_staging_bytes: of the rank that needs most, at one time, besides both sets of weights.
        messages_per_rank: received messages, mean over the ranks; a ring all-gather over p ranks
            has p - 1.
        collectives: collective calls that a rank takes part in.
    """

    recv_bytes: tuple[int, ...]
    send_bytes: tuple[int, ...]
    critical_bytes: int
    peak_staging_bytes: int
    messages_per_rank: float
    collectives: int


def _by_stage(pp: int, sizes: Iterable[tuple[int, int]]) -> _Bytes:
    """(stage, bytes) pairs summed: [pp]."""
    total = np.zeros(pp, np.int64)
    for stage, size in sizes:
        total[stage] += size
    return total


def _per_rank(source: MegatronLayout, by_stage: _Bytes) -> _Bytes:
    return np.repeat(by_stage, source.parallel.ranks_per_stage)


def _broadcast_sends(by_stage: _Bytes) -> _Bytes:
    """What a rank of each stage forwards in the rings of all stages' broadcasts: [pp].

    The ring of a stage's broadcast ends at the stage before it, which sends nothing.
    """
    if len(by_stage) == 1:
        return np.zeros_like(by_stage)
    total: _Bytes = by_stage.sum() - np.roll(by_stage, -1)
    return total


def _volumes(
    recv: _Bytes, send: _Bytes, critical: int, peak: int, messages: float, collectives: int
) -> Volumes:
    return Volumes(
        tuple(int(n) for n in recv),
        tuple(int(n) for n in send),
        int(critical),
        int(peak),
        float(messages),
        collectives,
    )


def gather_volumes(source: MegatronLayout, target: ShardLayout, item_bytes: int) -> Volumes:
    """verl's way: every rank ends with every whole tensor and cuts its engine shard out of it.

    Each tensor: a broadcast of the training shard from its stage to the same position of all other
    stages, then an all-gather over tensor parallelism, for experts over expert tensor parallelism
    and then expert parallelism. The target does not matter. One parameter at a time: the staging is
    a shard and the gathered tensors of it.

    Args:
        source: the trainer.
        target: the engine; not used, for one signature of all ways.
        item_bytes: of one element of tensors without a type of their own.
    """
    tensors, parallel = trainer_tensors(source, item_bytes), source.parallel
    pp, ep = parallel.pp, parallel.ep
    local = _by_stage(pp, ((t.stage, t.local_bytes) for t in tensors))
    gathered = sum((_gathered_copies(t, ep) - 1) * t.local_bytes for t in tensors)
    recv = local.sum() - local + gathered
    send = _broadcast_sends(local) + gathered
    params = sum(t.count for t in tensors)
    gathers = sum(((t.group > 1) + (t.is_expert and ep > 1)) * t.count for t in tensors)
    hops = sum(((t.group - 1) + (t.is_expert * (ep - 1))) * t.count for t in tensors)
    return _volumes(
        _per_rank(source, recv),
        _per_rank(source, send),
        (int(local.sum()) if pp > 1 else 0) + gathered,
        max(t.shard_bytes * ((pp > 1) + _staged_copies(t, ep)) for t in tensors),
        hops + params * (pp - 1) / pp,
        params * (pp > 1) + gathers,
    )


def _gathered_copies(tensor: TrainerTensor, ep: int) -> int:
    """Shards of a parameter, and of its like on the other expert ranks, after all gathers."""
    return tensor.group * (ep if tensor.is_expert else 1)


def _staged_copies(tensor: TrainerTensor, ep: int) -> int:
    """Shards in the buffers of the gathers of a parameter; none where nothing is gathered."""
    copies = _gathered_copies(tensor, ep)
    both = tensor.is_expert and tensor.group > 1 and ep > 1
    return (copies if copies > 1 else 0) + (tensor.group if both else 0)


def two_stage_volumes(source: MegatronLayout, target: ShardLayout, item_bytes: int) -> Volumes:
    """The CANN recipe's way: dense tensors whole on every rank, experts only where needed.

    Dense tensors of the layers: an all-gather over tensor parallelism inside the stage, then an
    exchange over the pipeline in which every slot holds the same tensor, one of each stage at a
    time: an all-gather (of unequal shards at the ends of uneven stages: a broadcast of each).
    Embedding, head and last norm: as in :func:`gather_volumes`. Experts, all of a row and layer at
    a time: a broadcast of the training shard to all stages, then an all-to-all-v inside the
    training tensor-and-expert group that brings each rank the experts of its engine position. The
    recipe itself is limited to engine EPs that are multiples of the training EP without ETP; the
    same exchange is counted here for any sizes.

    Args:
        source: the trainer.
        target: the engine.
        item_bytes: of one element of tensors without a type of their own.
    """
    tensors, pp = trainer_tensors(source, item_bytes), source.parallel.pp
    ends = [t for t in tensors if not t.in_layers]
    dense, experts = (
        [t for t in tensors if t.in_layers and t.is_expert is kind] for kind in (False, True)
    )
    inside = _by_stage(pp, ((t.stage, (t.group - 1) * t.shard_bytes) for t in dense))
    whole = _by_stage(pp, ((t.stage, t.group * t.shard_bytes) for t in dense))
    shards = _by_stage(pp, ((t.stage, t.local_bytes) for t in (*ends, *experts)))
    at_ends = sum((t.group - 1) * t.shard_bytes for t in ends)
    exchange = exchange_volumes(source, target, item_bytes)
    recv = inside + whole.sum() - whole + shards.sum() - shards + at_ends
    send = inside + _broadcast_sends(whole) + _broadcast_sends(shards) + at_ends
    slots = (whole.sum() - whole).max() if pp > 1 else 0
    critical = inside.max() + slots + (shards.sum() if pp > 1 else 0) + at_ends
    return _volumes(
        _per_rank(source, recv) + exchange.recv,
        _per_rank(source, send) + exchange.send,
        critical + np.maximum(exchange.recv, exchange.send).max(),
        _two_stage_staging(tensors, pp),
        sum(t.group - 1 for t in dense) / pp
        + sum(t.group - 1 for t in ends)
        + len(tensors) * (pp - 1) / pp
        + len(experts) * exchange.peers,
        _two_stage_collectives(dense, ends, pp) + len(experts) * ((pp > 1) + (exchange.peers > 0)),
    )


def _slots(dense: Iterable[TrainerTensor], pp: int) -> list[tuple[int, ...]]:
    """Bytes of the whole tensor of each stage in each exchange; 0 where a stage has no more."""
    sizes: list[list[int]] = [[] for _ in range(pp)]
    for tensor in dense:
        sizes[tensor.stage].append(tensor.group * tensor.shard_bytes)
    return list(zip_longest(*sizes, fillvalue=0))


def _two_stage_staging(tensors: Sequence[TrainerTensor], pp: int) -> int:
    """Dense: the gathered tensor and a slot per stage. Experts: the shard, and as much received."""
    slots = _slots((t for t in tensors if t.in_layers and not t.is_expert), pp)
    ends = (t.shard_bytes * ((pp > 1) + t.group) for t in tensors if not t.in_layers)
    experts = (2 * t.local_bytes for t in tensors if t.is_expert)
    return max(*(max(sizes) + (pp > 1) * sum(sizes) for sizes in slots), *ends, *experts)


def _two_stage_collectives(
    dense: Sequence[TrainerTensor], ends: Sequence[TrainerTensor], pp: int
) -> int:
    """Calls of a rank of the stage that has most dense tensors."""
    gathers = Counter(t.stage for t in dense if t.group > 1)
    at_ends = sum((pp > 1) + (t.group > 1) for t in ends)
    return max(gathers.values(), default=0) + at_ends + (len(_slots(dense, pp)) if pp > 1 else 0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The experts' all-to-all-v of ``two-stage``.

    Attributes:
        recv: bytes from other ranks, by rank.
        send: bytes to other ranks, by rank.
        peers: ranks that a rank receives from, mean.
    """

    recv: _Bytes
    send: _Bytes
    peers: float


def exchange_volumes(
    source: MegatronLayout, target: ShardLayout, item_bytes: int, ranks_per_node: int = 1
) -> Exchange:
    """Who gets what in the training tensor-and-expert groups: blocks of etp x ep ranks.

    What goes to other nodes, of so many ranks; with nodes of one rank all that goes to other ranks.
    """
    world, spec = source.parallel.world, source.spec
    recv, send = np.zeros(world, np.int64), np.zeros(world, np.int64)
    pairs: set[int] = set()
    rows = [row for row in source.rows if isinstance(row, ExpertRow)]
    names = [(name, row) for row in rows for name in row.hf_shapes(spec)]
    if not names:
        return Exchange(recv, send, 0.0)
    # layers whose experts lie on the same ranks move the same bytes
    times: Counter[tuple[range, ...]] = Counter()
    example: dict[tuple[range, ...], int] = {}
    for layer in rows[0].layers(spec):
        shards = _expert_shards(target, names[0][0], layer, spec.num_experts)
        places = tuple(shard.holders for of_expert in shards for shard in of_expert)
        times[places] += 1
        example.setdefault(places, layer)
    for places, num_layers in times.items():
        for name, row in names:
            size = ITEM_BYTES.get(row.dtype, item_bytes) * num_layers
            rows_of_layer = _moved_experts(source, target, name, example[places])
            for num_elements, senders, receivers in rows_of_layer:
                moved = senders // ranks_per_node != receivers // ranks_per_node
                np.add.at(recv, receivers[moved], num_elements * size)
                np.add.at(send, senders[moved], num_elements * size)
                pairs.update((receivers[moved] * world + senders[moved]).tolist())
    return Exchange(recv, send, len(pairs) / world)


def _expert_shards(
    layout: ShardLayout, pattern: str, layer: int, count: int
) -> list[tuple[Shard, ...]]:
    """The shards of one HF tensor of each expert of a layer."""
    of_layer = layer_name(pattern, layer)
    return [layout.shards(expert_name(of_layer, expert)) for expert in range(count)]


def _moved_experts(
    source: MegatronLayout, target: ShardLayout, pattern: str, layer: int
) -> Iterator[tuple[int, _Bytes, _Bytes]]:
    """One HF tensor of all experts of a layer: elements, senders, receivers (or the same rank)."""
    group, count = source.parallel.etp * source.parallel.ep, source.spec.num_experts
    ours = _expert_shards(source, pattern, layer, count)
    theirs = _expert_shards(target, pattern, layer, count)
    for src, dst in ((s, d) for a, b in zip(ours, theirs, strict=True) for s in a for d in b):
        box = None if src.mirror else src.piece.hf_box.intersect(dst.piece.hf_box)
        if box is None:
            continue
        receivers = np.asarray(dst.holders)
        senders = receivers // group * group + src.holders[0] % group
        yield box.num_elements, senders, receivers


def _share_with_mirrors(
    source: MegatronLayout, item_bytes: int, own: _Bytes, sends: npt.NDArray[np.float64]
) -> None:
    """Copies of a tied embedding are held, and sent from, as well."""
    world = source.parallel.world
    rows = [r for r in source.rows if r.tied_to and source.spec.tie_embeddings]
    for name in {str(row.tied_to) for row in rows}:
        shards = source.shards(name)
        for copy in (shard for shard in shards if shard.mirror):
            first = next(s for s in shards if s.piece.hf_box == copy.piece.hf_box)
            size = copy.piece.hf_box.num_elements * item_bytes
            before, now = len(first.holders), len(first.holders) + len(copy.holders)
            own[copy.holders] += size
            sends[copy.holders] += size * (world - now) / now
            sends[first.holders] += size * ((world - now) / now - (world - before) / before)


def stream_volumes(
    source: MegatronLayout, target: ShardLayout, item_bytes: int, bucket_bytes: int
) -> Volumes:
    """``stream``: every rank receives every whole HF tensor, in rounds; padding stays at home.

    A rank keeps what it has. The others are spread over the ranks that hold a shard, so what is
    sent is the mean over these; the planner's preference for near sources may differ from it.
    Rounds are at least those of a schedule that fills every bucket; each brings one message from
    every other model-parallel position. Staging: a bucket and the whole tensors of a round. What
    the product plans is in ``tools/plan_stream.py``.

    Args:
        source: the trainer.
        target: the engine; not used, for one signature of all ways.
        item_bytes: of one element of tensors without a type of their own.
        bucket_bytes: bound of send plus receive staging of a round.
    """
    parallel, spec = source.parallel, source.spec
    world, pp = parallel.world, parallel.pp
    tensors = trainer_tensors(source, item_bytes)
    padding = np.array([padding_bytes(source, tp, item_bytes) for tp in range(parallel.tp)])
    position, stage = np.arange(world) % parallel.tp, np.arange(world) // parallel.ranks_per_stage
    padded = padding[position, 0] * (stage == 0) + padding[position, 1] * (stage == pp - 1)
    own = _per_rank(source, _by_stage(pp, ((t.stage, t.local_bytes) for t in tensors))) - padded
    rows = [r for r in source.rows if not (spec.tie_embeddings and r.tied_to)]
    whole = [
        prod(shape) * ITEM_BYTES.get(r.dtype, item_bytes) * len(r.layers(spec))
        * (spec.num_experts if isinstance(r, ExpertRow) else 1)
        for r in rows
        for shape in r.hf_shapes(spec).values()
    ]  # fmt: skip
    total = sum(whole)
    send = np.zeros(pp, np.float64)
    for tensor in tensors:
        copies = num_copies(source, tensor)
        send[tensor.stage] += tensor.local_bytes * (world - copies) / copies
    of_vocabulary = parallel.ranks_per_stage // parallel.tp
    unsent = padded * (world - of_vocabulary) / of_vocabulary
    sends = np.repeat(send, parallel.ranks_per_stage) - unsent
    _share_with_mirrors(source, item_bytes, own, sends)
    recv, sends = total - own, sends.astype(np.int64)
    rounds = ceil((recv.max() + sends.max()) / bucket_bytes)
    positions = max(parallel.tp, parallel.etp * parallel.ep) * pp
    return _volumes(
        recv,
        sends,
        max(recv.max(), sends.max()),
        bucket_bytes + min(bucket_bytes, total),
        rounds * (positions - 1),
        rounds,
    )
