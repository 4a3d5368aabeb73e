"""Buffers of the baselines: the trainer's parameters of all stages, a bucket of each at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from math import prod
from typing import Literal

import torch

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.resharding.boxes import Box
from mindspeed_rl.resharding.executor import wire_dtype
from mindspeed_rl.resharding.layouts.base import (
    Piece,
    Shard,
    ShardLayout,
    expert_name,
    layer_name,
    pieces_of,
)
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

# "split": cut by tensor parallelism; "whole": the same on all ranks of a stage; "end": embedding,
# head and last norm where they are split.
Kind = Literal["split", "whole", "expert", "end"]


@dataclass(frozen=True, slots=True)
class StageParam:
    """A local parameter, alike on all ranks of a stage."""

    stage: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind

    @property
    def num_elements(self) -> int:
        """Of one rank's shard."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """Both layouts and this rank's weights.

    Attributes:
        source: the trainer.
        target: the engine; another trainer where a way can do that.
        rank: global rank.
        dtype: of weights without a type of their own.
        read: trainer parameters of this rank.
        write: engine parameters of this rank.
    """

    source: MegatronLayout
    target: ShardLayout
    rank: int
    dtype: torch.dtype
    read: Mapping[str, torch.Tensor]
    write: Mapping[str, torch.Tensor]


def hf_kinds(source: MegatronLayout) -> dict[str, Kind]:
    """Experts and the ends of the model, by HF name; what is not there belongs to the layers."""
    kinds: dict[str, Kind] = {}
    for row in source.rows:
        is_expert = isinstance(row, ExpertRow)
        if not is_expert and row.stage not in ("first", "last"):
            continue
        kind: Kind = "expert" if is_expert else "end"
        experts = source.spec.num_experts if is_expert else 1
        for pattern in row.hf_shapes(source.spec):
            for layer in row.layers(source.spec):
                of_layer = layer_name(pattern, layer)
                kinds |= {expert_name(of_layer, e): kind for e in range(experts)}
    return kinds


def stage_params(model: Model) -> list[StageParam]:
    """Every parameter that peers send, of all stages, in the order of the table."""
    source, found = model.source, {}
    kinds, size = hf_kinds(source), source.parallel.ranks_per_stage
    for stage in range(source.parallel.pp):
        first = stage * size
        shapes = source.local_shapes(first)
        for shard in pieces_of(source, first):
            name, hf_name = shard.piece.param, shard.piece.hf_name
            if shard.mirror:
                continue
            kind = kinds.get(hf_name, "split")
            if kind != "expert" and len(shard.holders) == size:
                kind = "whole"
            dtype = wire_dtype(source.dtype_of(hf_name), model.dtype)
            found[stage, name] = StageParam(stage, name, tuple(shapes[name]), dtype, kind)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one stage that travel together; a slot holds one rank's shards of them."""

    stage: int
    params: tuple[StageParam, ...]

    @property
    def num_elements(self) -> int:
        """Of a slot."""
        return sum(p.num_elements for p in self.params)


Round = tuple[Bucket, ...]


def make_rounds(params: Sequence[StageParam], pp: int, slot_bytes: int) -> Iterator[Round]:
    """A bucket of at most ``slot_bytes`` (or one parameter) of every stage; one element type."""
    by_dtype = sorted(params, key=lambda p: str(p.dtype))
    for _, of_dtype in groupby(by_dtype, key=lambda p: p.dtype):
        alike = list(of_dtype)
        stages = [_buckets([p for p in alike if p.stage == s], slot_bytes) for s in range(pp)]
        for several in zip_longest(*stages, fillvalue=()):
            yield tuple(Bucket(stage, tuple(group)) for stage, group in enumerate(several))


def _buckets(params: Sequence[StageParam], slot_bytes: int) -> list[list[StageParam]]:
    buckets: list[list[StageParam]] = []
    used = slot_bytes
    for param in params:
        size = param.num_elements * param.dtype.itemsize
        if used + size > slot_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(param)
        used += size
    return buckets


@dataclass(frozen=True, slots=True)
class StagedRound:
    """Buffers of a round.

    Attributes:
        stages: per stage [slots, elements]; the slots of a stage are contiguous.
        shown: (stage, parameter, slot) -> the staged shard in its shape.
    """

    stages: tuple[torch.Tensor, ...]
    shown: Mapping[tuple[int, str, int], torch.Tensor]


def num_staged(part: Round, slots: int) -> int:
    """Elements of a round's buffers."""
    return sum(bucket.num_elements for bucket in part) * slots


def dtype_of(part: Round) -> torch.dtype:
    """Element type of a round."""
    return next(param.dtype for bucket in part for param in bucket.params)


def stage_round(part: Round, slots: int, pool: torch.Tensor) -> StagedRound:
    """Lay a round out at the beginning of ``pool`` (uint8)."""
    dtype, start = dtype_of(part), 0
    flat = pool.view(dtype)
    stages, shown = [], {}
    for bucket in part:
        size = bucket.num_elements
        buffer = flat[start : start + slots * size].view(slots, size)
        stages.append(buffer)
        start += slots * size
        for slot in range(slots):
            offset = 0
            for param in bucket.params:
                view = buffer[slot, offset : offset + param.num_elements].view(param.shape)
                shown[bucket.stage, param.name, slot] = view
                offset += param.num_elements
    return StagedRound(tuple(stages), shown)


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy."""

    to: torch.Tensor
    origin: torch.Tensor

    def run(self) -> None:
        """Do it."""
        self.to.copy_(self.origin)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A rectangle that a target rank takes out of a training shard."""

    src: Shard
    dst: Piece
    box: Box

    def of_source(self, param: torch.Tensor) -> torch.Tensor:
        """The rectangle in the source parameter, own or staged."""
        piece = self.src.piece
        inside = self.box.moved(piece.hf_box, piece.param_box)
        shown: torch.Tensor = piece.view.of(param)[inside.slices]
        return shown

    def of_target(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rectangle in the engine parameter."""
        inside = self.box.moved(self.dst.hf_box, self.dst.param_box)
        shown: torch.Tensor = self.dst.view.of(params[self.dst.param])[inside.slices]
        return shown


def overlaps(
    source: MegatronLayout, target: ShardLayout, rank: int, wanted: Callable[[str], bool]
) -> Iterator[Overlap]:
    """What ``rank`` needs of which training shard, in the order of the HF tensors."""
    for dst in pieces_of(target, rank):
        if not wanted(dst.piece.hf_name):
            continue
        for src in source.shards(dst.piece.hf_name):
            box = None if src.mirror else src.piece.hf_box.intersect(dst.piece.hf_box)
            if box is not None:
                yield Overlap(src, dst.piece, box)


def new_pool(num_bytes: int) -> torch.Tensor:
    """A buffer that fits any element type: [num_bytes] uint8."""
    return torch.empty(-(-num_bytes // 8) * 8, dtype=torch.uint8)
