"""Loads weights of checkpoints that Megatron-LM or MindSpeed-LLM wrote, in any layout."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_rl.convert.formats import open_checkpoint, recognise
from mindspeed_rl.convert.source import Source, UnreadableError
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weight_layouts.base import pieces_of


def load_foreign(directory: str | os.PathLike[str], engine: TrainEngine) -> str:
    """Fill a model from a checkpoint of another tool. Collective: the world.

    Every rank reads only the rectangles that it holds, so the two layouts may differ.

    Returns:
        A description of what was loaded; empty if there is no such checkpoint and nothing changed.

    Raises:
        UsageError: On all ranks, if some rank cannot read it or it is of another model.
    """
    found: list[str] = [""]
    if dist.get_rank() == 0 and (newest := recognise(Path(directory), "mg")):
        found = [str(newest[1])]
    dist.broadcast_object_list(found, 0)
    if not found[0]:
        return ""
    if engine.adapters is not None:
        raise UsageError(
            f"--load {directory}: {found[0]} holds whole weights, no adapters; convert it with "
            "python -m mindspeed_rl.convert and name it as --hf-checkpoint, or remove --lora-rank"
        )
    problem, source = "", None
    try:
        source = open_checkpoint(Path(found[0]), "mg", engine.spec, flag="--load")
        _fill(engine, source)
    except (OSError, UsageError, UnreadableError) as error:
        problem = f"rank {dist.get_rank()}: {error}"
    if problem := next(filter(None, gather_objects(problem)), ""):
        raise UsageError(f"--load {directory}: {problem}")
    assert source is not None
    engine.reload_master_weights()
    return f"weights of {found[0]} ({source.kind})"


@torch.no_grad()
def _fill(engine: TrainEngine, source: Source) -> None:
    """Read this rank's rectangles one at a time; padding rows become 0. Local."""
    params = engine.named_parameters()
    engine.platform.synchronize()  # a late copy would overwrite what is read
    for param in params.values():
        param.zero_()
    for shard in pieces_of(engine.layout, dist.get_rank()):
        piece = shard.piece
        target = piece.view.of(params[piece.param])[piece.param_box.slices]
        values = torch.empty(piece.hf_box.size, dtype=source.dtype_of(piece.hf_name))
        source.read(piece.hf_name, piece.hf_box, values)
        target.copy_(values)
