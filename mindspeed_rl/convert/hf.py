"""Hugging Face checkpoints: plain and block-scaled FP8 ones as sources, plain ones as targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint.hf import weight_files
from mindspeed_rl.checkpoint.side_files import config_text, side_files
from mindspeed_rl.convert.format import Format, Request
from mindspeed_rl.convert.source import Scales, Source, StoredTensor, TensorPart
from mindspeed_rl.convert.target import (
    SAFETENSORS_TYPES,
    OutputTensor,
    Target,
    in_files,
    safetensors_file,
)
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.blocks import EMBED_NAME
from mindspeed_rl.models.hf_files import INDEX, index_text, shard_names
from mindspeed_rl.models.registry import weight_table
from mindspeed_rl.models.safetensors_files import StoredEntry, safetensors_entries
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.weight_layouts.base import Piece

SCALE = "_scale_inv"
# Key of config.json that only a quantised checkpoint has.
QUANTISATION = "quantization_config"
_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
_TYPES["F8_E4M3"] = torch.float8_e4m3fn


def open_hf(directory: Path, spec: ModelSpec, extends_ep: bool) -> Source:
    """Open a Hugging Face checkpoint as a source; quantised tensors are read as bfloat16.

    Raises:
        UsageError: Unreadable files, or a quantisation other than FP8 in blocks.
    """
    files = weight_files(directory)
    entries: dict[str, tuple[Path, StoredEntry]] = {}
    for path in sorted(set(files.values())):
        found = safetensors_entries(path)
        entries |= {name: (path, entry) for name, entry in found.items() if files.get(name) == path}
    if lacking := sorted(set(files) - set(entries)):
        raise UsageError(f"{files[lacking[0]]}: lacks {lacking[0]}, which the index says is there")
    block = _block_size(read_hf_config(directory), directory)
    parts = {
        name: (_part(name, path, entry, entries, block),)
        for name, (path, entry) in entries.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in entries)
    }
    shapes = {name: part.hf_box.size for name, (part,) in parts.items()}
    kind = "Hugging Face" + (", FP8 in blocks" if block else "")
    return Source(
        str(directory), kind, shapes, parts.__getitem__, tuple(sorted(set(files.values())))
    )


def _block_size(config: Mapping[str, Any], directory: Path) -> tuple[int, int] | None:
    """Return rows and columns that share a factor; ``None`` where nothing is quantised."""
    quantised = config.get(QUANTISATION)
    if not quantised:
        return None
    method, block = quantised.get("quant_method"), quantised.get("weight_block_size")
    if method != "fp8" or not block or len(block) != 2:
        raise UsageError(
            f"{directory}: config.json has {QUANTISATION} with quant_method {method!r} and "
            f"weight_block_size {block}; allowed: fp8 with blocks such as [128, 128]. Convert the "
            "checkpoint to bfloat16 with the tool that came with it first"
        )
    return int(block[0]), int(block[1])


def _part(
    name: str,
    path: Path,
    entry: StoredEntry,
    entries: Mapping[str, tuple[Path, StoredEntry]],
    block: tuple[int, int] | None,
) -> TensorPart:
    dtype = _TYPES.get(entry.dtype)
    scaled = entries.get(name + SCALE)
    if dtype is None or (dtype.itemsize == 1) != (scaled is not None and block is not None):
        raise UsageError(
            f"{path}: {name} has the element type {entry.dtype}"
            + ("" if scaled else f" and no {name}{SCALE}")
            + f"; allowed: {', '.join(SAFETENSORS_TYPES.values())}, or F8_E4M3 with such factors "
            "and weight_block_size in config.json"
        )
    box = Box.whole(entry.shape)
    stored = StoredTensor(path, entry.offset, dtype, entry.shape)
    if scaled is None or block is None:
        return TensorPart(box, stored, box)
    factors = scaled[1]
    wanted = tuple(-(-size // b) for size, b in zip(entry.shape, block, strict=True))
    if factors.shape != wanted or factors.dtype != "F32":
        raise UsageError(
            f"{scaled[0]}: {name}{SCALE} has shape {factors.shape} and type {factors.dtype}, "
            f"config.json implies {wanted} and F32"
        )
    scales = Scales(StoredTensor(scaled[0], factors.offset, torch.float32, factors.shape), block)
    return TensorPart(box, stored, box, scales=scales)


def plan_hf(request: Request) -> Target:
    """Plan safetensors files of at most ``shard_bytes``, with the files that describe the model."""
    dtypes = request.dtypes()
    tensors = []
    for name, shape in request.shapes.items():
        box = Box.whole(shape)
        tensors.append(OutputTensor(name, dtypes[name], shape, (Piece(name, box, name, box),)))
    groups = in_files(tensors, request.shard_bytes)
    names = shard_names(len(groups))
    files = tuple(safetensors_file(*file) for file in zip(names, groups, strict=True))
    file_of = {tensor.name: file.path for file in files for tensor in file.tensors}
    text = index_text(file_of, sum(file.num_bytes for file in files)).encode()
    small = _side_files(request, dtypes[EMBED_NAME])
    if len(files) > 1:
        small[INDEX] = text
    return Target(files, small, dtypes)


def _side_files(request: Request, dtype: torch.dtype) -> dict[str, bytes]:
    """Make the config and tokenizer files."""
    keys: dict[str, Any] = dict(weight_table(request.spec.family).config_keys)
    if request.spec.num_mtp_layers and not request.keeps_mtp:
        keys["num_nextn_predict_layers"] = 0
    folder = request.config_dir
    files = {file.name: file.read_bytes() for file in side_files(folder, folder)}
    text = config_text(folder, dtype, keys, without=(QUANTISATION,))
    return files | {"config.json": text.encode()}


FORMAT = Format(
    name="safetensors",
    model_type="hf",
    files="*.safetensors",
    help="",
    recognises=lambda folder: any(folder.glob("*.safetensors*")),
    open=open_hf,
    plan=plan_hf,
)
