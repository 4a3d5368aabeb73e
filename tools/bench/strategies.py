"""The ways to reshard, behind one face: build once, run many times, count bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.gather import GatherReshard
from bench.peer_volumes import Volumes, gather_volumes, two_stage_volumes
from bench.staging import Model, Overlap
from bench.two_stage import TwoStageReshard
from bench.wire import TrainerGroups, Wire
from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.executor import Resharder, Round, wire_dtype
from mindspeed_rl.resharding.layouts.base import Piece, Shard, ShardLayout, pieces_of
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.transports import AllToAllTransport


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


class CountingTransport(AllToAllTransport):
    """The product's transport; counts what arrives too."""

    def __init__(self, world: int) -> None:
        super().__init__(world, torch.device("cpu"), None)
        self.received_bytes = 0

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_sizes: Mapping[int, int],
        dtype: torch.dtype,
    ) -> dict[int, torch.Tensor]:
        """Send, receive and count."""
        received = super().exchange(sends, receive_sizes, dtype)
        self.received_bytes += sum(t.numel() * t.element_size() for t in received.values())
        return received


class _Product:
    """A :class:`Resharder` to some layout."""

    def __init__(self, setting: Setting, target: ShardLayout) -> None:
        world = setting.model.source.parallel.world
        self._setting = setting
        self._transport = CountingTransport(world)
        self._resharder = Resharder(
            setting.model.source,
            target,
            rank=setting.model.rank,
            ranks_per_node=world,
            transport=self._transport,
            dtype=setting.model.dtype,
            bucket_bytes=setting.bucket_bytes,
        )

    def traffic(self) -> Traffic:
        """Counted in the transport since the beginning."""
        return Traffic(self._transport.received_bytes, self._transport.sent_bytes)


class DirectReshard(_Product):
    """The product's planner, trainer to engine."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, setting.model.target)

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        model = self._setting.model
        self._resharder.run(model.read, model.write)


class _WholeTensors(dict[str, torch.Tensor]):
    """HF tensors that exist from their first rectangle until the engine has its pieces."""

    def __init__(self, layout: HfFileLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self._layout, self._dtype = layout, dtype

    def __missing__(self, name: str) -> torch.Tensor:
        dtype = wire_dtype(self._layout.dtype_of(name), self._dtype)
        self[name] = torch.empty(self._layout.hf_shapes[name], dtype=dtype)
        return self[name]


class StreamReshard(_Product):
    """The product's ``stream``: whole HF tensors on every rank, from which the engine's are cut."""

    def __init__(self, setting: Setting) -> None:
        model = setting.model
        files = HfFileLayout.of(model.source, range(model.source.parallel.world))
        super().__init__(setting, files)
        self._whole = _WholeTensors(files, model.dtype)
        self._cuts: dict[str, list[Overlap]] = {}
        for dst in pieces_of(model.target, model.rank):
            name = dst.piece.hf_name
            box = Box.whole(files.hf_shapes[name])
            whole = Shard(Piece(name, box, name, box), range(1))
            self._cuts.setdefault(name, []).append(Overlap(whole, dst.piece, dst.piece.hf_box))

    def run(self) -> None:
        """Reshard once. Collective: the world."""
        self._resharder.run(self._setting.model.read, self._whole, self._cut)

    def _cut(self, part: Round) -> None:
        for name in part.names:
            tensor = self._whole.pop(name)
            for overlap in self._cuts.get(name, ()):
                overlap.of_target(self._setting.model.write).copy_(overlap.of_source(tensor))


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


def _gather(setting: Setting) -> Strategy:
    return _Baseline(GatherReshard(setting.model, setting.groups, setting.bucket_bytes))


def _two_stage(setting: Setting) -> Strategy:
    return _Baseline(TwoStageReshard(setting.model, setting.groups, setting.bucket_bytes))


STRATEGIES: Mapping[str, Callable[[Setting], Strategy]] = {
    "direct": DirectReshard,
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
