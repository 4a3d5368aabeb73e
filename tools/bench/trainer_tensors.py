"""What the peers convert at a time: the trainer's parameters, one row and layer after the other."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mindspeed_rl.models.expert_rules import ExpertRow
from mindspeed_rl.models.rules import Row, Share
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout

ITEM_BYTES = {"float32": 4}


@dataclass(frozen=True, slots=True)
class TrainerTensor:
    """The local parameters of one row at one layer: what the peers convert at a time.

    Attributes:
        stage: pipeline stage that holds it.
        shard_bytes: of one parameter on one rank, with padding.
        count: parameters of the row and layer on a rank: 1, or its experts.
        group: ranks that share the tensor by tensor parallelism; 1: each holds it whole.
        is_expert: cut by expert parallelism too.
        in_layers: neither embedding, nor head, nor the last norm.
    """

    stage: int
    shard_bytes: int
    count: int
    group: int
    is_expert: bool
    in_layers: bool = True

    @property
    def local_bytes(self) -> int:
        """All parameters of the row and layer on one rank."""
        return self.shard_bytes * self.count


def trainer_tensors(source: MegatronLayout, item_bytes: int) -> tuple[TrainerTensor, ...]:
    """Every row at every layer of the trainer, in the order of the table."""
    return tuple(
        _tensor(source, row, layer, item_bytes)
        for row in source.rows
        if not (source.spec.tie_embeddings and row.tied_to)
        for layer in row.layers(source.spec)
    )


def _tensor(source: MegatronLayout, row: Row, layer: int, item_bytes: int) -> TrainerTensor:
    spec, parallel = source.spec, source.parallel
    size = ITEM_BYTES.get(row.dtype, item_bytes)
    stage = stage_of_row(source, row, layer)
    if isinstance(row, ExpertRow):
        shard = prod(row.local_shape(spec, Share(0, parallel.etp)))
        count = spec.num_experts // parallel.ep
        return TrainerTensor(stage, shard * size, count, parallel.etp, True)
    multiple = source.vocab_multiple if row.stage in ("first", "last") else 1
    shape = row.local_shape(spec, Share(0, parallel.tp, multiple=multiple))
    is_split = shape != row.local_shape(spec, Share(0, 1, multiple=multiple))
    return TrainerTensor(
        stage,
        prod(shape) * size,
        1,
        parallel.tp if is_split else 1,
        is_expert=False,
        in_layers=row.stage not in ("first", "last"),
    )


def stage_of_row(source: MegatronLayout, row: Row, layer: int) -> int:
    """The pipeline stage that holds a row at a layer."""
    stages = source.parallel.stages
    if row.stage == "first":
        return 0
    if row.stage == "last":
        return int(stages.pp) - 1
    return int(stages.place_of(layer).stage)


def padding_bytes(source: MegatronLayout, tp: int, item_bytes: int) -> tuple[int, int]:
    """Vocabulary padding of a tensor-parallel position in the first and in the last stage."""
    share = Share(tp, source.parallel.tp, multiple=source.vocab_multiple)
    first, last = (
        sum(
            row.padding(source.spec, share) * item_bytes
            for row in source.rows
            if row.stage == stage and not (source.spec.tie_embeddings and row.tied_to)
        )
        for stage in ("first", "last")
    )
    return first, last


def num_copies(source: MegatronLayout, tensor: TrainerTensor) -> int:
    """How many ranks hold the same shard."""
    parallel = source.parallel
    shared = tensor.group * (parallel.ep if tensor.is_expert else 1)
    return int(parallel.ranks_per_stage) // shared
