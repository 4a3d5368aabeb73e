"""The ways to reshard, behind one face: build once, run many times, count bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.gather import GatherReshard
from bench.peer_volumes import Volumes, gather_volumes, two_stage_volumes
from bench.staging import Model, Overlap
from bench.two_stage import TwoStageReshard
from bench.wire import TrainerGroups, Wire
from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.executor import Resharder, wire_dtype
from mindspeed_rl.resharding.layouts.base import Piece, Shard, pieces_of
from mindspeed_rl.resharding.stream import TensorStream
from mindspeed_rl.resharding.transports import make_transport


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank over the wire."""

    received_bytes: int
    sent_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """What came after ``before``."""
        return Traffic(
            self.received_bytes - before.received_bytes, self.sent_bytes - before.sent_bytes
        )


class Strategy(Protocol):
    """A prepared reshard of this rank."""

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        ...

    def traffic(self) -> Traffic:
        """Counted in the transport since the beginning."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What all ways are built from."""

    model: Model
    groups: TrainerGroups
    bucket_bytes: int


class _Product:
    """What the product's ways share."""

    def __init__(self, setting: Setting, transport: str = "p2p") -> None:
        self._model = setting.model
        self._world = setting.model.source.parallel.world
        self._transport = make_transport(transport, self._world, torch.device("cpu"))
        self._common: dict[str, Any] = {
            "rank": setting.model.rank,
            "ranks_per_node": self._world,
            "transport": self._transport,
            "dtype": setting.model.dtype,
            "bucket_bytes": setting.bucket_bytes,
        }

    def traffic(self) -> Traffic:
        """Counted in the transport since the beginning."""
        return Traffic(self._transport.received_bytes, self._transport.sent_bytes)


class DirectReshard(_Product):
    """The product's planner, trainer to engine."""

    def __init__(self, setting: Setting, transport: str = "p2p") -> None:
        super().__init__(setting, transport)
        self._resharder = Resharder(self._model.source, self._model.target, **self._common)

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        self._resharder.run(self._model.read, self._model.write)


class StreamReshard(_Product):
    """The product's ``stream``: whole HF tensors on every rank, from which the engine's are cut."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        model = self._model
        self._stream = TensorStream(model.source, range(self._world), **self._common)
        self._cuts: dict[str, list[Overlap]] = {}
        for dst in pieces_of(model.target, model.rank):
            name = dst.piece.hf_name
            box = Box.whole(model.source.shape_of(name))
            whole = Shard(Piece(name, box, name, box), range(1))
            self._cuts.setdefault(name, []).append(Overlap(whole, dst.piece, dst.piece.hf_box))

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        self._stream.run(self._model.read, self._cut)

    def _cut(self, name: str, tensor: torch.Tensor) -> None:
        for overlap in self._cuts.get(name, ()):
            overlap.of_target(self._model.write).copy_(overlap.of_source(tensor))


class _Baseline:
    """A way of the peers; its wire counts."""

    def __init__(self, reshard: GatherReshard | TwoStageReshard) -> None:
        self._reshard = reshard

    @property
    def wire(self) -> Wire:
        """The counter."""
        return self._reshard.wire

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        self._reshard.run()

    def traffic(self) -> Traffic:
        """Counted in the transport since the beginning."""
        return Traffic(self.wire.received_bytes, self.wire.sent_bytes)


def _direct_all_to_all(setting: Setting) -> Strategy:
    return DirectReshard(setting, "all-to-all")


def _gather(setting: Setting) -> Strategy:
    return _Baseline(GatherReshard(setting.model, setting.groups, setting.bucket_bytes))


def _two_stage(setting: Setting) -> Strategy:
    return _Baseline(TwoStageReshard(setting.model, setting.groups, setting.bucket_bytes))


STRATEGIES: Mapping[str, Callable[[Setting], Strategy]] = {
    "direct": DirectReshard,
    "direct-all-to-all": _direct_all_to_all,
    "stream": StreamReshard,
    "gather": _gather,
    "two-stage": _two_stage,
}


def wire_of(way: Strategy) -> Wire | None:
    """The counter of a baseline; ``None`` for the product's ways."""
    return way.wire if isinstance(way, _Baseline) else None


def closed_form(name: str, model: Model) -> Volumes | None:
    """What a baseline must move; ``None`` for the product's ways, whose plans say it."""
    if name == "gather":
        return gather_volumes(model.source, model.target, model.dtype.itemsize)
    if name == "two-stage":
        return two_stage_volumes(model.source, model.target, model.dtype.itemsize)
    return None


def floor_bytes(model: Model) -> int:
    """What this rank must receive: its engine pieces less what it has of them as a trainer."""
    own: dict[str, list[Box]] = {}
    for shard in pieces_of(model.source, model.rank):
        boxes = own.setdefault(shard.piece.hf_name, [])
        if shard.piece.hf_box not in boxes:  # a tied embedding may be there twice
            boxes.append(shard.piece.hf_box)
    total = 0
    for piece in (shard.piece for shard in pieces_of(model.target, model.rank)):
        size = wire_dtype(model.source.dtype_of(piece.hf_name), model.dtype).itemsize
        held = (piece.hf_box.intersect(box) for box in own.get(piece.hf_name, ()))
        kept = sum(box.num_elements for box in held if box)
        total += (piece.hf_box.num_elements - kept) * size
    return total
