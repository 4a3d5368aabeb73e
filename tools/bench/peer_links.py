"""Which part of the peers' bytes crosses nodes: a ring that leaves a node runs at the speed of the
link that it leaves by, and only the ranks that it enters a node by receive from elsewhere.

The parts are those of the closed forms in :mod:`bench.peer_volumes`, group by group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.peer_volumes import Volumes, exchange_volumes
from bench.trainer_tensors import TrainerTensor, trainer_tensors
from mindspeed_rl.parallel.layout import ParallelLayout
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Critical bytes at the speed of links within a node, and at that of links between nodes."""

    within_nodes: int
    between_nodes: int

    def seconds(self, intra_node_gbs: float, inter_node_gbs: float) -> float:
        """Time on the wire, one kind of link after the other.

        Args:
            intra_node_gbs: 1e9 bytes per second and direction of a rank within its node.
            inter_node_gbs: the same to other nodes.
        """
        within, between = self.within_nodes / intra_node_gbs, self.between_nodes / inter_node_gbs
        return (within + between) / 1e9


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which kinds of groups of a training layout leave a node somewhere."""

    parallel: ParallelLayout
    ranks_per_node: int

    def _leaves(self, size: int) -> bool:
        """Whether some run of ``size`` neighbours is cut by the end of a node."""
        fits = size <= self.ranks_per_node and self.ranks_per_node % size == 0
        return not fits and self.parallel.world > self.ranks_per_node

    @property
    def tensor(self) -> bool:
        """Tensor-parallel neighbours."""
        return self._leaves(self.parallel.tp)

    @property
    def expert_tensor(self) -> bool:
        """Ranks that share one expert."""
        return self._leaves(self.parallel.etp)

    @property
    def expert(self) -> bool:
        """Ranks that share the experts of a layer."""
        return self._leaves(self.parallel.etp * self.parallel.ep)

    @property
    def pipeline(self) -> bool:
        """The same position of all stages."""
        return self.parallel.pp > 1 and self.parallel.world > self.ranks_per_node


def _links(parts: Iterable[tuple[bool, int]]) -> LinkBytes:
    """(crosses nodes, bytes) pairs summed."""
    totals = [0, 0]
    for crosses, size in parts:
        totals[crosses] += int(size)
    return LinkBytes(*totals)


def _gathered(tensors: Iterable[TrainerTensor]) -> int:
    return sum((t.group - 1) * t.local_bytes for t in tensors)


def gather_links(source: MegatronLayout, item_bytes: int, ranks_per_node: int) -> LinkBytes:
    """Links of :func:`~bench.peer_volumes.gather_volumes`."""
    tensors, groups = trainer_tensors(source, item_bytes), _Groups(source.parallel, ranks_per_node)
    experts = [t for t in tensors if t.is_expert]
    dense = [t for t in tensors if not t.is_expert]
    ep = source.parallel.ep
    return _links(
        (
            (groups.pipeline, sum(t.local_bytes for t in tensors) * (source.parallel.pp > 1)),
            (groups.tensor, _gathered(dense)),
            (groups.expert_tensor, _gathered(experts)),
            (groups.expert, sum((ep - 1) * t.group * t.local_bytes for t in experts)),
        )
    )


def two_stage_links(
    source: MegatronLayout, target: VllmLayout, item_bytes: int, ranks_per_node: int
) -> LinkBytes:
    """Links of :func:`~bench.peer_volumes.two_stage_volumes`."""
    tensors, groups = trainer_tensors(source, item_bytes), _Groups(source.parallel, ranks_per_node)
    pp = source.parallel.pp
    ends = [t for t in tensors if not t.in_layers]
    experts = [t for t in tensors if t.is_expert]
    inside, whole = np.zeros(pp, np.int64), np.zeros(pp, np.int64)
    for tensor in tensors:
        if tensor.in_layers and not tensor.is_expert:
            inside[tensor.stage] += (tensor.group - 1) * tensor.shard_bytes
            whole[tensor.stage] += tensor.group * tensor.shard_bytes
    shards = sum(t.local_bytes for t in (*ends, *experts))
    slots = int((whole.sum() - whole).max()) + shards if pp > 1 else 0
    exchange = exchange_volumes(source, target, item_bytes)
    return _links(
        (
            (groups.tensor, int(inside.max()) + _gathered(ends)),
            (groups.pipeline, slots),
            (groups.expert, int(np.maximum(exchange.recv, exchange.send).max())),
        )
    )


def stream_links(volumes: Volumes, missing_on_nodes: Mapping[int, int]) -> LinkBytes:
    """Links of :func:`~bench.peer_volumes.stream_volumes`.

    Args:
        volumes: the closed form.
        missing_on_nodes: bytes of whole tensors that each node does not hold: each of its ranks
            receives them from elsewhere.
    """
    between = min(max(missing_on_nodes.values()), volumes.critical_bytes)
    return LinkBytes(volumes.critical_bytes - between, between)


# --- what each rank receives from other nodes ----------------------------------------------------

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Rings:
    """By rank of a training layout: whether what comes before it in a ring is on another node."""

    parallel: ParallelLayout
    ranks_per_node: int

    def _enters(self, step: int, size: int) -> npt.NDArray[np.bool_]:
        """Rings of ``size`` ranks, ``step`` apart."""
        ranks = np.arange(self.parallel.world)
        before = np.where(ranks // step % size, ranks - step, ranks + (size - 1) * step)
        entered: npt.NDArray[np.bool_] = (
            before // self.ranks_per_node != ranks // self.ranks_per_node
        )
        return entered

    @property
    def tensor(self) -> npt.NDArray[np.bool_]:
        """Tensor-parallel neighbours."""
        return self._enters(1, self.parallel.tp)

    @property
    def expert_tensor(self) -> npt.NDArray[np.bool_]:
        """Ranks that share one expert."""
        return self._enters(1, self.parallel.etp)

    @property
    def expert(self) -> npt.NDArray[np.bool_]:
        """Ranks that share the experts of a layer."""
        return self._enters(self.parallel.etp, self.parallel.ep)

    @property
    def pipeline(self) -> npt.NDArray[np.bool_]:
        """The same position of all stages."""
        return self._enters(self.parallel.ranks_per_stage, self.parallel.pp)


def _from_other_stages(parallel: ParallelLayout, by_stage: _Bytes) -> _Bytes:
    """By rank: what all other stages have."""
    others: _Bytes = np.repeat(by_stage.sum() - by_stage, parallel.ranks_per_stage)
    return others


def gather_from_other_nodes(
    source: MegatronLayout, item_bytes: int, ranks_per_node: int
) -> tuple[int, ...]:
    """By rank, the part of :func:`~bench.peer_volumes.gather_volumes` from other nodes."""
    parallel, tensors = source.parallel, trainer_tensors(source, item_bytes)
    rings = _Rings(parallel, ranks_per_node)
    local = np.zeros(parallel.pp, np.int64)
    for tensor in tensors:
        local[tensor.stage] += tensor.local_bytes
    experts = [t for t in tensors if t.is_expert]
    of_peers = sum((parallel.ep - 1) * t.group * t.local_bytes for t in experts)
    total = (
        rings.pipeline * _from_other_stages(parallel, local)
        + rings.tensor * _gathered(t for t in tensors if not t.is_expert)
        + rings.expert_tensor * _gathered(experts)
        + rings.expert * of_peers
    )
    return tuple(total.tolist())


def two_stage_from_other_nodes(
    source: MegatronLayout, target: VllmLayout, item_bytes: int, ranks_per_node: int
) -> tuple[int, ...]:
    """By rank, the part of :func:`~bench.peer_volumes.two_stage_volumes` from other nodes."""
    parallel, tensors = source.parallel, trainer_tensors(source, item_bytes)
    rings = _Rings(parallel, ranks_per_node)
    inside, passed_on = np.zeros(parallel.pp, np.int64), np.zeros(parallel.pp, np.int64)
    for tensor in tensors:
        if tensor.in_layers and not tensor.is_expert:
            inside[tensor.stage] += (tensor.group - 1) * tensor.shard_bytes
            passed_on[tensor.stage] += tensor.group * tensor.shard_bytes
        else:
            passed_on[tensor.stage] += tensor.local_bytes
    at_ends = _gathered(t for t in tensors if not t.in_layers)
    total = (
        rings.tensor * (np.repeat(inside, parallel.ranks_per_stage) + at_ends)
        + rings.pipeline * _from_other_stages(parallel, passed_on)
        + exchange_volumes(source, target, item_bytes, ranks_per_node).recv
    )
    return tuple(total.tolist())


def stream_from_other_nodes(
    world: int, ranks_per_node: int, missing_on_nodes: Mapping[int, int]
) -> tuple[int, ...]:
    """By rank, the part of :func:`~bench.peer_volumes.stream_volumes` from other nodes.

    Args:
        world: all ranks.
        ranks_per_node: neighbours that hold tensors for each other.
        missing_on_nodes: as in :func:`stream_links`.
    """
    return tuple(missing_on_nodes.get(rank // ranks_per_node, 0) for rank in range(world))
