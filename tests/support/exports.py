"""Exports of given tensors from one rank, by the product's own plan and writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.model_files.export import export_model, stored_tensor
from mindspeed_rl.model_files.export_folder import ExportFolder
from mindspeed_rl.model_files.export_plan import SHARD_BYTES, plan_export
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.transports import PointToPointTransport


@contextmanager
def world_of_one() -> Iterator[None]:
    """A process group of this process alone, unless there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_export(
    target: Path,
    source: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    step: int = 1,
    tokenizer: Path | None = None,
    config_keys: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    buffer_bytes: int = 1 << 20,
    copied: Mapping[str, Path] | None = None,
) -> int:
    """Export tensors as a run does; the number of files of an earlier attempt that were kept.

    ``copied`` has the files of further tensors, which are copied.
    """
    extra = [stored_tensor(path, name) for name, path in (copied or {}).items()]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    declared = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()}
    layout = HfFileLayout(shapes, range(1), declared)
    folder = ExportFolder(target, source, dtype, step, tokenizer or source, config_keys or {})
    with world_of_one():
        return export_model(
            layout,
            tensors,
            plan_export(layout, dtype, range(1), 1, extra, shard_bytes=shard_bytes),
            folder,
            rank=0,
            ranks_per_node=1,
            transport=PointToPointTransport(1, torch.device("cpu"), None),
            buffer_bytes=buffer_bytes,
            copied=copied,
        )
