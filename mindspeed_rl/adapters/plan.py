"""Which weights of a rank have an adapter, and which part of it each rectangle of them needs.

It follows from the table of weights: a parameter of the trainer consists of rectangles of HF
tensors, and each HF tensor W [out, in] has one adapter of its own, A [r, in] and B [out, r],
however the trainer fuses, orders and cuts its rows. The rectangle with rows R and columns C of W
then needs the rows R of B and the columns C of A.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from mindspeed_rl.algorithms.lora import ALL_LINEAR, LoraSettings
from mindspeed_rl.core.boxes import PLAIN
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.weight_layouts.base import pieces_of
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

#: Name of the module of a chunk that holds its adapters.
MODULE = "adapters"
_WEIGHT = ".weight"
_MERGE_BYTES = 8  # per element


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows of a parameter that are consecutive rows of an HF tensor."""

    hf_name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class AdaptedParam:
    """A parameter of the trainer with adapters.

    Attributes:
        name: Name in the layout.
        runs: Its rows in order, all of them; those of weights without an adapter have no name.
        columns: Its columns within the HF tensors, start and end.
    """

    name: str
    runs: tuple[RowRun, ...]
    columns: tuple[int, int]

    @property
    def tensors(self) -> tuple[str, ...]:
        """HF tensors of the parameter, each once."""
        return tuple(dict.fromkeys(run.hf_name for run in self.runs if run.hf_name))


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters of a rank.

    Attributes:
        params: Parameters with adapters, by name.
        shapes: Whole shapes [out, in] of the HF tensors with an adapter.
    """

    params: Mapping[str, AdaptedParam]
    shapes: Mapping[str, tuple[int, int]]

    def is_copied(self, name: str) -> bool:
        """Whether a parameter has its HF tensors whole, so that no rank has only a part of them."""
        param = self.params[name]
        rows: Counter[str] = Counter()
        for run in param.runs:
            rows[run.hf_name] += run.count
        width = param.columns[1] - param.columns[0]
        return all((rows[name], width) == self.shapes[name] for name in param.tensors)

    def factor_shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of A and B of every adapter, in the order in which they are built.

        The names begin with the chunk, as those of parameters do.
        """
        found: dict[str, tuple[int, int]] = {}
        for param in self.params.values():
            chunk = param.name.partition(".")[0]
            prefix = f"{chunk}." if chunk.startswith("chunk") else ""
            for hf_name in param.tensors:
                rows, columns = self.shapes[hf_name]
                found[prefix + factor_name(hf_name, "A")] = (rank, columns)
                found[prefix + factor_name(hf_name, "B")] = (rows, rank)
        return found


def factor_name(hf_name: str, factor: str) -> str:
    """Return the name of A or B of an adapter, as PEFT has it without its prefix."""
    return f"{hf_name.removesuffix(_WEIGHT)}.lora_{factor}.weight"


def adapter_shapes(layout: MegatronLayout, lora: LoraSettings) -> list[tuple[int, int]]:
    """Return the shapes of A and B of all adapters of the whole model. Pure."""
    found = [shape for name, shape in layout.hf_shapes.items() if lora.covers(name)]
    first = [(lora.lora_rank, columns) for _, columns in found]
    return [*first, *((rows, lora.lora_rank) for rows, _ in found)]


@lru_cache(maxsize=128)
def plan_adapters(layout: MegatronLayout, rank: int, lora: LoraSettings) -> AdapterPlan:
    """Return the adapters of a rank. Pure.

    Raises:
        UsageError: A pipeline stage, or a chunk of it, has no adapter.
    """
    found: dict[str, dict[int, tuple[RowRun, tuple[int, int]]]] = defaultdict(dict)
    shapes: dict[str, tuple[int, int]] = {}
    for shard in pieces_of(layout, rank):
        piece = shard.piece
        if not lora.covers(piece.hf_name):
            continue
        assert piece.view == PLAIN and not shard.is_replica, piece
        assert piece.param_box.lo[1] == 0, piece
        rows, columns = layout.shape_of(piece.hf_name)
        shapes[piece.hf_name] = (rows, columns)
        (first, left), (count, width) = piece.hf_box.lo, piece.hf_box.size
        run = RowRun(piece.hf_name, first, count)
        found[piece.param][piece.param_box.lo[0]] = (run, (left, left + width))
    local = layout.local_shapes(rank)
    params = {name: _adapted_param(name, runs, local[name]) for name, runs in found.items()}
    _refuse_empty_chunks(layout, rank, lora, params)
    return AdapterPlan(params, shapes)


def merge_bytes(layout: MegatronLayout, rank: int, lora: LoraSettings) -> int:
    """Return the bytes that a merged weight and its gradient take for a moment. Pure.

    In bf16 these are the weight and the sum in fp32 while it is made, and in the backward pass the
    sum and its gradient, the latter in fp32 as well; in fp32 the sum and its gradient.
    """
    if not lora.is_on:
        return 0
    shapes = layout.local_shapes(rank)
    return _MERGE_BYTES * max(
        prod(shapes[name]) for name in plan_adapters(layout, rank, lora).params
    )


def _adapted_param(
    name: str, found: Mapping[int, tuple[RowRun, tuple[int, int]]], shape: tuple[int, ...]
) -> AdaptedParam:
    """Order the rows of a parameter; a fused one may have weights with and without adapters."""
    runs: list[RowRun] = []
    row = 0
    for start in sorted(found):
        if start > row:
            runs.append(RowRun("", 0, start - row))
        run, _ = found[start]
        if (
            runs
            and runs[-1].hf_name == run.hf_name
            and runs[-1].first + runs[-1].count == run.first
        ):
            runs[-1] = RowRun(run.hf_name, runs[-1].first, runs[-1].count + run.count)
        else:
            runs.append(run)
        row = start + run.count
    if row < shape[0]:
        runs.append(RowRun("", 0, shape[0] - row))
    (columns,) = {span for _, span in found.values()}
    assert columns[1] - columns[0] == shape[1], f"{name}: columns {columns} of {shape}"
    return AdaptedParam(name, tuple(runs), columns)


def _refuse_empty_chunks(
    layout: MegatronLayout, rank: int, lora: LoraSettings, params: Mapping[str, AdaptedParam]
) -> None:
    vpp = layout.parallel.stages.vpp
    for chunk in range(vpp):
        prefix = f"chunk{chunk}." if vpp > 1 else ""
        if not any(name.startswith(prefix) for name in params):
            stage = layout.parallel.coords(rank).pp
            raise UsageError(
                f"--lora-target {' '.join(lora.lora_target)}: pipeline stage {stage} has no such "
                "layer, so nothing of it would be trained; name further layers, or all-linear"
            )


def check_adapters(layout: MegatronLayout, lora: LoraSettings, platform: str) -> None:
    """Refuse adapters on a model or on modules that cannot have them. Pure.

    Args:
        layout: Layout of the trainer.
        lora: Flags of the adapters.
        platform: Kind of device: ``"cpu"``, ``"cuda"`` or ``"npu"``.

    Raises:
        UsageError: Naming the flag and what is allowed.
    """
    if not lora.is_on:
        return
    if layout.modules.fused_norms and platform != "npu":
        raise UsageError(
            f"--lora-rank {lora.lora_rank}: that the linear layers of Transformer Engine compute "
            "with the weights of adapters was never shown; use --transformer-impl local, or "
            "remove the flag"
        )
    for target in lora.lora_target:
        if not replace(lora, lora_target=(target,)).layers_among(layout.hf_shapes):
            held = replace(lora, lora_target=(ALL_LINEAR,)).layers_among(layout.hf_shapes)
            raise UsageError(
                f"--lora-target {target}: this model has no such layer; allowed: {' '.join(held)}, "
                f"or {ALL_LINEAR}"
            )
    for stage in range(layout.parallel.pp):
        plan_adapters(layout, stage * layout.parallel.ranks_per_stage, lora)
