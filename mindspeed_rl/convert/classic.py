"""Classic Megatron checkpoints: ``iter_*/mp_rank_*`` of Megatron-LM and MindSpeed-LLM.

There is one file per tensor-, pipeline- and expert-parallel rank. The layout of a source is
inferred from its files: sizes from their names, layers and dialect from parameter names. Stored
arguments of the run are used only where files of two layouts have the same shapes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint.names import shortened
from mindspeed_rl.checkpoint.resume import TRACKER
from mindspeed_rl.config.layouts import layer_numbers, stage_layout
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.convert.checkpoint_files import MODEL_FILE, CheckpointLayout, classic_grid
from mindspeed_rl.convert.format import Format, LayoutFlags, Request
from mindspeed_rl.convert.source import Source, StoredTensor, TensorPart
from mindspeed_rl.convert.target import OutputFile, Target, params_of_rank
from mindspeed_rl.convert.torch_files import (
    read_torch_file,
    save_unfilled,
    saved_iteration,
    stored_tensor,
)
from mindspeed_rl.convert.training_arguments import run_arguments
from mindspeed_rl.core.boxes import Shape
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.stages import StageLayout, filled_slots
from mindspeed_rl.models.param_names import (
    MTP_COPIES,
    ParamNames,
    mindspeed_names,
    recognised_from,
)
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weight_layouts.megatron import chunk_prefix

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc1\.|linear_fc1\.weight(\d+)$)"
)
_EMBEDDING = "embedding.word_embeddings.weight"
# Suffixes of module state that is not a weight.
_NO_WEIGHTS = ("_extra_state", "inv_freq", "local_tokens_per_expert", "attention_mask")
Chunks = tuple[dict[str, StoredTensor], ...]


@dataclass(frozen=True, slots=True)
class _Files:
    """Contents of the files, by (tensor, pipeline, expert) parallel rank."""

    folder: Path
    chunks: Mapping[tuple[int, int, int], Chunks]
    args: Any
    iteration: int

    def sizes(self) -> tuple[int, int, int]:
        tp, pp, ep = (1 + max(key[axis] for key in self.chunks) for axis in range(3))
        return tp, pp, ep


def open_classic(folder: Path, spec: ModelSpec, extends_ep: bool) -> Source:
    """Open a classic checkpoint as a source.

    Args:
        folder: Folder that holds ``mp_rank_*``.
        spec: Specification of the model.
        extends_ep: Whether ``--moe-tp-extend-ep`` was given; used where the files do not tell.

    Raises:
        UsageError: Unreadable or missing files, or parameters that the model does not have.
    """
    files = _read(folder)
    layout = _layout(files, spec, extends_ep)
    held = _checked(files, layout)
    names = layout.hf_shapes
    copies = _copies(layout.spec) if layout.modules.mtp else {}
    shapes: dict[str, Shape] = {**names, **{name: names[main] for name, main in copies.items()}}

    @cache
    def parts_of(name: str) -> tuple[TensorPart, ...]:
        shards = layout.shards(copies.get(name, name))
        return tuple(
            TensorPart(
                shard.piece.hf_box,
                held[shard.owner_ranks[0]][shard.piece.param],
                shard.piece.param_box,
                shard.piece.view,
            )
            for shard in shards
            if not shard.is_replica
        )

    paths = tuple(sorted(folder.glob(f"mp_rank_*/{MODEL_FILE}")))
    return Source(str(folder), _words(layout), shapes, parts_of, paths, files.iteration)


def _copies(spec: ModelSpec) -> dict[str, str]:
    """Map HF tensors of multi-token-prediction layers that files hold once: copy -> original."""
    embedding = MTP_COPIES["embed_tokens.weight"]
    return {
        f"model.layers.{layer}.{tail}": embedding if spec.tie_embeddings else main
        for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
        for tail, main in MTP_COPIES.items()
    }


def _words(layout: CheckpointLayout) -> str:
    p = layout.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.stages.vpp}
    if layout.spec.moe:
        sizes |= {"ep": p.ep, "etp": p.etp}
    kept = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return "classic Megatron" + (f", {' x '.join(kept)}" if kept else "")


def _read(folder: Path) -> _Files:
    """Read all files, with tensors as places in the files."""
    raw: dict[tuple[int, ...], Chunks] = {}
    args, iteration = None, 1
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            continue
        file = path / MODEL_FILE
        if not file.is_file():
            raise UsageError(f"{path}: {MODEL_FILE} is missing; copy the checkpoint again")
        state = read_torch_file(file)
        if not isinstance(state, Mapping):
            raise UsageError(f"{file}: holds no checkpoint of Megatron")
        raw[tuple(int(n) for n in match.groups() if n is not None)] = model_chunks(file, state)
        args, iteration = state.get("args", args), saved_iteration(state)
    lengths = {len(key) for key in raw}
    if len(lengths) != 1:
        raise UsageError(f"{folder}: files of several layouts ({', '.join(map(str, sorted(raw)))})")
    return _Files(folder, dict(_axes(raw, lengths.pop())), args, iteration)


def model_chunks(file: Path, state: Mapping[str, Any]) -> Chunks:
    """Return the parameters of each chunk of an interleaved pipeline; otherwise one chunk."""
    numbered = sorted((k for k in state if re.fullmatch(r"model\d+", k)), key=lambda k: int(k[5:]))
    keys = ["model"] if "model" in state else numbered
    if not keys:
        raise UsageError(f"{file}: no model in it; keys: {', '.join(map(str, state))}")
    return tuple(
        {
            name: stored_tensor(file, value)
            for name, value in state[key].items()
            if isinstance(value, torch.Tensor) and not name.endswith(_NO_WEIGHTS)
        }
        for key in keys
    )


def params_of(chunks: Chunks) -> dict[str, StoredTensor]:
    """Return the parameters of a file under the names of a layout, with their chunk's prefix."""
    count = len(chunks)
    return {
        chunk_prefix(i, count) + n: t for i, chunk in enumerate(chunks) for n, t in chunk.items()
    }


def _axes(
    raw: Mapping[tuple[int, ...], Chunks], length: int
) -> Iterable[tuple[tuple[int, int, int], Chunks]]:
    """Yield ranks of three axes; a second number is the stage unless one stage holds both ends."""
    first = raw[min(raw)]
    both_ends = any(name.endswith("final_layernorm.weight") for name in first[-1])
    for key, chunks in raw.items():
        if length == 3:
            yield (key[0], key[1], key[2]), chunks
        elif length == 1:
            yield (key[0], 0, 0), chunks
        else:
            yield (key[0], 0, key[1]) if both_ends else (key[0], key[1], 0), chunks


def _layout(files: _Files, spec: ModelSpec, extends_ep: bool) -> CheckpointLayout:
    tp, pp, ep = files.sizes()
    first_files = [files.chunks.get((0, stage, 0)) for stage in range(pp)]
    if any(chunks is None for chunks in first_files):
        raise UsageError(f"{files.folder}: files of some pipeline stages are missing")
    stages = [chunks for chunks in first_files if chunks is not None]
    vpp = len(stages[0])
    slots = tuple(
        tuple(sorted({int(m[1]) for name in stages[stage][chunk] if (m := _LAYER.match(name))}))
        for chunk in range(vpp)
        for stage in range(pp)
    )
    counts = tuple(map(len, slots))
    if sum(counts) != spec.num_layers:
        raise UsageError(
            f"{files.folder}: the files hold {sum(counts)} layers ({'-'.join(map(str, counts))}), "
            f"config.json has {spec.num_layers}; give the config.json of this model (--hf-cfg-dir)"
        )
    params = {name for chunks in stages for chunk in chunks for name in chunk}
    names = recognised_from(params, spec)
    if names.mtp:  # The config of a model that was converted without them may lack them.
        numbers = {match[1] for name in params if (match := _MTP_LAYER.match(name))}
        spec = replace(spec, num_mtp_layers=len(numbers))
    embedding = stages[0][0].get(_EMBEDDING)
    if embedding is None or embedding.shape[0] * tp < spec.vocab_size:
        found = "none" if embedding is None else f"{embedding.shape[0]} rows on each of {tp} ranks"
        raise UsageError(
            f"{files.folder}: embedding: {found}; config.json has a vocabulary of {spec.vocab_size}"
        )
    etp, extends = _expert_cut(files, spec, names, extends_ep)
    grid = classic_grid(StageLayout(pp, counts), tp, ep, etp, extends)
    return CheckpointLayout(
        spec, grid, embedding.shape[0], modules=names, slots=slots, extends_ep=extends
    )


def _expert_cut(
    files: _Files, spec: ModelSpec, names: ParamNames, extends_ep: bool
) -> tuple[int, bool]:
    """Return the ranks that share an expert, and whether TP ranks extend expert parallelism."""
    tp, _, ep = files.sizes()
    if spec.moe is None:
        return tp, False
    params = {n: t for key, cs in files.chunks.items() if key[0] == key[2] == 0 for c in cs
              for n, t in c.items()}  # fmt: skip
    if names.experts == "stacked":
        flat = next(t.shape for n, t in params.items() if n.endswith("mlp.experts.weight2"))
        whole = spec.num_experts * spec.moe.expert_ffn_size // ep
        if flat[0] * tp != whole or tp == 1:
            return (1 if tp > 1 else tp), False
        stored = getattr(files.args, "moe_tp_extend_ep", None)
        extends = bool(stored) if isinstance(stored, bool) else extends_ep
        return (1, True) if extends else (tp, False)
    found = [(m, t.shape) for n, t in params.items() if (m := _EXPERT.search(n))]
    if not found:
        raise UsageError(f"{files.folder}: no experts in the files, config.json has some")
    local = 1 + max(int(m[1] or m[2] or 0) for m, _ in found)
    etp = 2 * spec.moe.expert_ffn_size // found[0][1][0]
    extends = tp > 1 and local * ep * tp == spec.num_experts
    return etp, extends


def _checked(files: _Files, layout: CheckpointLayout) -> dict[int, dict[str, StoredTensor]]:
    """Return the parameters of every rank of the layout, under its names and in its shapes."""
    held: dict[int, dict[str, StoredTensor]] = {}
    for rank in range(layout.parallel.world):
        coords = layout.parallel.coords(rank)
        chunks = files.chunks.get((coords.tp, coords.pp, layout.file_ep(rank)))
        if chunks is None:
            raise UsageError(
                f"{files.folder}: {layout.folder_of(rank)} is missing; the other files are of "
                f"{_words(layout)}"
            )
        found = params_of(chunks)
        wanted = layout.local_shapes(rank)
        where = f"{files.folder / layout.folder_of(rank)}"
        if missing := sorted(wanted.keys() - found.keys()):
            raise UsageError(f"{where}: {shortened(missing)} missing, which config.json implies")
        if unknown := sorted(found.keys() - wanted.keys()):
            raise UsageError(f"{where}: config.json does not imply {shortened(unknown)}")
        for name, shape in wanted.items():
            stored = layout.stored_shape(name, shape)
            if found[name].shape != stored:
                raise UsageError(
                    f"{where}: {name} has shape {found[name].shape}, config.json implies {stored}"
                )
        held[rank] = {name: found[name].reshaped(shape) for name, shape in wanted.items()}
    if len(files.chunks) > len(held):
        raise UsageError(
            f"{files.folder}: {len(files.chunks)} files, of which {_words(layout)} has "
            f"{len(held)}; remove the files of other layouts"
        )
    return held


def plan_classic(request: Request) -> Target:
    """Plan ``iter_<iteration>/mp_rank_*`` of every rank of the layout, and the tracker file.

    Raises:
        UsageError: Sizes that do not fit the model or each other.
    """
    layout, noop = _target_layout(request.layout, request.spec, request.keeps_mtp)
    args = argparse.Namespace(**run_arguments(layout, noop))
    dtypes, iteration = request.dtypes(), request.source.iteration
    files = tuple(
        _file(layout, rank, dtypes, iteration, args) for rank in range(layout.parallel.world)
    )
    small = {TRACKER: f"{iteration}".encode()}
    return Target(files, small, {name: dtypes[name] for name in layout.hf_shapes})


def _target_layout(
    flags: LayoutFlags, spec: ModelSpec, keeps_mtp: bool
) -> tuple[CheckpointLayout, list[int]]:
    """Return a layout with one rank for each file, and its empty slots."""
    tp, pp = flags.tensor_parallel, flags.pipeline_parallel
    noop = layer_numbers("--noop-layers", flags.noop_layers)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp,
        num_layer_list=flags.num_layer_list,
        num_layers_per_virtual_pipeline_stage=flags.num_layers_per_virtual_pipeline_stage,
    )
    stages = stage_layout(ModelConfig(noop_layers=flags.noop_layers), parallel, spec.num_layers)
    etp, extends = flags.expert_tensor_parallel or tp, flags.moe_tp_extend_ep
    if extends and flags.expert_tensor_parallel not in (None, 1):
        raise UsageError(
            f"--moe-tp-extend-ep makes experts whole; --expert-tensor-parallel-size {etp}: remove "
            "one of the two"
        )
    grid = classic_grid(stages, tp, flags.expert_parallel, etp, extends)
    names = mindspeed_names(
        spec,
        transformer_engine=flags.transformer_impl == "transformer_engine",
        grouped=flags.moe_grouped_gemm,
        split_up=flags.mla_mm_split,
        mtp=keeps_mtp,
    )
    slots = filled_slots(spec.num_layers, pp, stages.vpp, noop) if noop else ()
    divisor = flags.make_vocab_size_divisible_by
    return CheckpointLayout(
        spec, grid, divisor, modules=names, slots=slots, extends_ep=extends
    ), noop


def _file(
    layout: CheckpointLayout,
    rank: int,
    dtypes: Mapping[str, torch.dtype],
    iteration: int,
    args: argparse.Namespace,
) -> OutputFile:
    tensors = params_of_rank(layout, rank, dtypes)
    stored = [(t.dtype, layout.stored_shape(name, t.shape)) for name, t in tensors.items()]
    vpp = layout.parallel.stages.vpp

    def objects(saved: Sequence[torch.Tensor]) -> dict[str, Any]:
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        for chunk in range(vpp):
            prefix = chunk_prefix(chunk, vpp)
            state["model" if vpp == 1 else f"model{chunk}"] = {
                param.removeprefix(prefix): tensor
                for param, tensor in zip(tensors, saved, strict=True)
                if param.startswith(prefix)
            }
        return state

    def frame(path: Path) -> list[int]:
        with path.open("wb") as file:
            save_unfilled(file, stored, objects)
        found = params_of(model_chunks(path, read_torch_file(path)))
        return [found[param].offset for param in tensors]

    path = f"iter_{iteration:07d}/{layout.folder_of(rank)}/{MODEL_FILE}"
    return OutputFile(path, tuple(tensors.values()), frame)


FORMAT = Format(
    name="torch",
    model_type="mg",
    files=f"mp_rank_*/{MODEL_FILE}",
    help="one file per rank of the layout, under MindSpeed-LLM's names",
    recognises=lambda folder: any(folder.glob(f"mp_rank_*/{MODEL_FILE}")),
    open=open_classic,
    plan=plan_classic,
    layout_flags=frozenset(field.name for field in fields(LayoutFlags)),
)
