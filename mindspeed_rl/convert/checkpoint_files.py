"""Layouts of the files of Megatron checkpoints: where they keep each rectangle of each HF tensor.

The classic layout has one file for each pair of (tensor, pipeline, expert) parallel ranks,
``iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``, with the parameters of the rank under
its local names. megatron-core's distributed format keeps parameters whole, so its layout has only
one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import LayerPlace, StageLayout
from mindspeed_rl.models.blocks import EMBED_NAME
from mindspeed_rl.models.param_names import ParamNames
from mindspeed_rl.models.rules import Vocab, WeightRow
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.base import RowPlacement
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

MODEL_FILE = "model_optim_rng.pt"


@dataclass(frozen=True)
class CheckpointLayout(MegatronLayout):
    """A training layout with the parameter names of a checkpoint.

    Attributes:
        slots: Local numbers of the layers of each chunk, in the order of the model; MindSpeed
            counts empty layers. Empty: from 0 on.
        extends_ep: Whether tensor-parallel ranks extend expert parallelism, which file names do not
            count.
    """

    slots: tuple[tuple[int, ...], ...] = ()
    extends_ep: bool = False

    @cached_property
    def present_rows(self) -> tuple[WeightRow, ...]:
        """All rows; on a single stage the head of a tied model is the embedding itself."""
        if self.parallel.pp > 1:
            return self.rows
        return tuple(r for r in self.rows if not (self._is_tied(r) or _repeats_embedding(r)))

    def _place_of(self, row: WeightRow, layer: int) -> LayerPlace:
        place = super()._place_of(row, layer)
        if not self.slots or row.stage in ("first", "last", "mtp"):
            return place
        chunk = place.chunk * self.parallel.pp + place.stage
        return LayerPlace(place.stage, place.chunk, self.slots[chunk][place.local])

    def places(self, row: WeightRow, layer: int, expert: int) -> Iterator[RowPlacement]:
        for place in super().places(row, layer, expert):
            yield replace(place, is_replica=place.is_replica or _repeats_embedding(row))

    # --- files ---

    def folder_of(self, rank: int) -> str:
        """Return the name of the folder of a rank's file."""
        parallel = self.parallel
        coords = parallel.coords(rank)
        expert = self.file_ep(rank)
        name = f"mp_rank_{coords.tp:02d}"
        if parallel.pp > 1:
            name += f"_{coords.pp:03d}"
        return name + (f"_{expert:03d}" if self.num_file_ep > 1 else "")

    @property
    def num_file_ep(self) -> int:
        """Expert-parallel size as the names of files count it."""
        return self.parallel.ep // (self.parallel.tp if self.extends_ep else 1)

    def file_ep(self, rank: int) -> int:
        """Return the expert-parallel rank as file names count it."""
        return self.parallel.expert_coords(rank).ep // (self.parallel.tp if self.extends_ep else 1)

    def stored_shape(self, param: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file, where stacks of experts are flat matrices."""
        if param.endswith("mlp.experts.weight1"):
            return shape[1], math.prod(shape) // shape[1]
        if param.endswith("mlp.experts.weight2"):
            return math.prod(shape) // shape[2], shape[2]
        return shape


def _repeats_embedding(row: WeightRow) -> bool:
    return isinstance(row, Vocab) and row.stage == "last" and row.hf == EMBED_NAME


def classic_grid(
    stages: StageLayout, tp: int, ep: int, etp: int, extends_ep: bool
) -> ParallelLayout:
    """Return the smallest world whose ranks are the files of a classic checkpoint, one each.

    Args:
        stages: Layers of the pipeline stages.
        tp: Tensor parallelism.
        ep: Expert parallelism as file names count it.
        etp: Number of ranks that share an expert.
        extends_ep: Whether tensor-parallel ranks extend expert parallelism.

    Raises:
        UsageError: Several ranks would share a file.
    """
    if etp not in (1, tp):
        raise UsageError(
            f"--expert-tensor-parallel-size {etp}: a classic checkpoint has one file per tensor- "
            f"and expert-parallel rank; allowed: 1 or --target-tensor-parallel-size {tp}, or "
            "--ckpt-format torch_dist, which every layout can load"
        )
    if extends_ep:
        ep, etp = ep * tp, 1
    ranks = math.lcm(tp, ep * etp)
    return ParallelLayout.build(world=stages.pp * ranks, stages=stages, tp=tp, ep=ep, etp=etp)


def whole_layout(spec: ModelSpec, names: ParamNames, padded_vocab: int) -> CheckpointLayout:
    """Return the layout of one rank that holds everything, as a distributed checkpoint does."""
    stages = StageLayout(1, (spec.num_layers,))
    grid = ParallelLayout.build(world=1, stages=stages)
    return CheckpointLayout(spec, grid, padded_vocab, names)
