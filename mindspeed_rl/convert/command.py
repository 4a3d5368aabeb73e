"""The steps of ``tools/convert_checkpoint.py``, from options to a finished checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mindspeed_rl.checkpoint.hf_writer import config_text, side_files
from mindspeed_rl.checkpoint.names import check_names, mtp_tensors
from mindspeed_rl.checkpoint.resume import CONVERTED, RECORD, TRACKER, CheckpointRecord
from mindspeed_rl.config.layouts import layer_numbers, stage_layout
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.convert.classic import plan_classic, run_arguments
from mindspeed_rl.convert.hf import open_hf, plan_hf
from mindspeed_rl.convert.megatron import open_megatron
from mindspeed_rl.convert.options import MODEL_TYPES, ConversionOptions, without_effect
from mindspeed_rl.convert.run import convert
from mindspeed_rl.convert.source import Source, same_bits
from mindspeed_rl.convert.target import Target
from mindspeed_rl.convert.torch_dist import plan_distributed
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.core.stages import filled_slots
from mindspeed_rl.models.file_names import (
    MTP_COPIES,
    FileNames,
    distributed_names,
    mindspeed_names,
)
from mindspeed_rl.models.module_names import LOCAL, TRANSFORMER_ENGINE
from mindspeed_rl.models.registry import spec_from_hf_config, weight_table
from mindspeed_rl.models.spec import ModelSpec, read_hf_config
from mindspeed_rl.weights.layouts.checkpoint_files import (
    CheckpointLayout,
    classic_grid,
    whole_layout,
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_QUANTISATION = ("quantization_config",)
Log = Callable[[str], None]


@dataclass(frozen=True)
class _Model:
    """The model that is converted: config, directory of the config, and architecture."""

    directory: Path
    config: Mapping[str, Any]
    spec: ModelSpec


def run_conversion(options: ConversionOptions, log: Log) -> None:
    """Convert a checkpoint; ``log`` receives one line per step.

    Raises:
        UsageError: Flags, files or a model that cannot be converted.
        OSError: A file cannot be read or written.
    """
    start = time.monotonic()
    config_dir, target_dir = _directories(options)
    model = _model(options, config_dir)
    _check_flags(options, model.spec)
    source = _open(options, model)
    shapes = _wanted(options, model.spec, source, log)
    target = _plan(options, model, source, shapes)
    size = target.num_bytes
    if unused := without_effect(options):
        log(f"without effect, this target has no layout: {', '.join(unused)}")
    log(
        f"{source.kind}: {options.load_dir} -> {target_dir}: {len(target.dtypes)} tensors, "
        f"{len(target.files)} files, {size / 1e9:.2f} GB"
    )
    bar = tqdm(
        total=size,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=options.no_progress or None,
    )

    def check(out: Path) -> None:
        if options.verify:
            verify(source, _reopen(options, model, out), target, options.workers)

    with bar:
        kept = convert(
            source, target, target_dir, workers=options.workers, advance=bar.update, check=check
        )
    if kept:
        log(f"resumed: {kept / 1e9:.2f} GB were written before")
    if options.verify:
        log(f"verified: {len(target.dtypes)} tensors are bit-equal in source and result")
    seconds = time.monotonic() - start
    log(f"done in {seconds:.1f} s: {target_dir}")


def _directories(options: ConversionOptions) -> tuple[Path, Path]:
    """Return the directory of the config and the directory of the result."""
    source, target = Path(options.load_dir), Path(options.save_dir)
    if not source.is_dir():
        raise UsageError(f"--load-dir {source}: no such directory")
    if options.load_model_type == "hf":
        config = source
    elif options.hf_cfg_dir:
        config = Path(options.hf_cfg_dir)
    elif (target / "config.json").is_file() and options.save_model_type == "hf":
        config, target = target, target / "mg2hf"
    else:
        raise UsageError(
            "--hf-cfg-dir is missing: files of Megatron do not say all of the architecture; name "
            "the directory with the config.json and the tokenizer of the model"
        )
    place = target.resolve()
    for flag, path in (("--load-dir", source), ("--hf-cfg-dir", config)):
        kept = path.resolve()
        if place in (kept, *kept.parents):
            raise UsageError(f"--save-dir {target} is or contains {flag} {path}; choose another")
    return config, target


def _model(options: ConversionOptions, directory: Path) -> _Model:
    flag = "--load-dir" if options.load_model_type == "hf" else "--hf-cfg-dir"
    config = read_hf_config(directory, flag=flag)
    plain = {key: value for key, value in config.items() if key not in _QUANTISATION}
    return _Model(directory, config, spec_from_hf_config(plain))


def _check_flags(options: ConversionOptions, spec: ModelSpec) -> None:
    """Check the flags that repeat what config.json says.

    Raises:
        UsageError: They contradict it, or refer to parts that the model does not have.
    """
    families = MODEL_TYPES.get(options.model_type_hf, (spec.family,))
    if options.model_type_hf and options.model_type_hf not in MODEL_TYPES:
        raise UsageError(
            f"--model-type-hf {options.model_type_hf} is not supported; allowed: "
            f"{', '.join(MODEL_TYPES)}, or leave it out: config.json says it"
        )
    if spec.family not in families:
        raise UsageError(
            f"--model-type-hf {options.model_type_hf}: config.json is of a {spec.family} model"
        )
    noop = layer_numbers("--noop-layers", options.noop_layers)
    allowed = sorted({spec.num_layers, spec.num_layers + len(noop)})
    if options.num_layers is not None and options.num_layers not in allowed:
        raise UsageError(
            f"--num-layers {options.num_layers}: config.json has {spec.num_layers} layers"
            + (f", {allowed[-1]} with --noop-layers" if noop else "")
        )
    dense = next(iter(spec.expert_layers), 0)
    if options.first_k_dense_replace not in (None, dense):
        raise UsageError(
            f"--first-k-dense-replace {options.first_k_dense_replace}: config.json has {dense}"
        )
    if options.mtp_num_layers not in (0, spec.num_mtp_layers):
        raise UsageError(
            f"--mtp-num-layers {options.mtp_num_layers}: config.json has {spec.num_mtp_layers} "
            "(num_nextn_predict_layers); allowed: that, or 0 to leave them out"
        )
    if options.mtp_num_layers and options.ckpt_format == "torch_dist":
        raise UsageError(
            "--mtp-num-layers with --ckpt-format torch_dist is not supported; use --ckpt-format "
            "torch, or 0"
        )
    given = (
        ("--moe-tp-extend-ep", options.moe_tp_extend_ep, spec.moe),
        ("--target-expert-parallel-size", options.expert_parallel > 1, spec.moe),
        ("--mla-mm-split", options.mla_mm_split, spec.latent),
    )
    for flag, on, has in given:
        if on and has is None:
            raise UsageError(f"{flag}: the {spec.family} model has nothing to cut so; remove it")


def _open(options: ConversionOptions, model: _Model) -> Source:
    directory = Path(options.load_dir)
    if options.load_model_type == "hf":
        if not any(directory.glob("*.safetensors*")) and (directory / TRACKER).exists():
            raise UsageError(
                f"--load-dir {directory} is a Megatron checkpoint: --load-model-type mg"
            )
        return open_hf(directory, model.config, "--load-dir")
    return open_megatron(directory, model.spec, extends_ep=options.moe_tp_extend_ep)


def _wanted(
    options: ConversionOptions, spec: ModelSpec, source: Source, log: Log
) -> dict[str, tuple[int, ...]]:
    """Return the HF tensors of the result with their shapes, in the order of the table.

    Raises:
        UsageError: The source has unknown tensors, lacks some, or has some in other shapes.
    """
    keeps = options.mtp_num_layers > 0
    table = whole_layout(spec, FileNames(mtp=keeps), spec.vocab_size).hf_shapes
    mtp = mtp_tensors(_with_mtp(options, spec, source), source.shapes)
    copies = [name for name in mtp if name.split(".", 3)[-1] in MTP_COPIES]
    left_out = set(copies if keeps else mtp)
    check_names(f"--load-dir {options.load_dir}", set(source.shapes) - left_out, table)
    if mtp and not keeps:
        hint = f"; --mtp-num-layers {spec.num_mtp_layers} keeps them" if spec.num_mtp_layers else ""
        log(f"left out: {len(mtp)} tensors of multi-token prediction{hint}")
    for name, shape in table.items():
        if source.shapes[name] != shape:
            raise UsageError(
                f"--load-dir {options.load_dir}: {name} has shape {source.shapes[name]}, "
                f"config.json implies {shape}; give the config.json and the weights of one model"
            )
    if not keeps:
        return dict(table)
    _check_copies(spec, source, copies)
    return dict(table) | {name: source.shapes[name] for name in copies}


def _with_mtp(options: ConversionOptions, spec: ModelSpec, source: Source) -> ModelSpec:
    """Return the spec with the multi-token-prediction layers that a Megatron source has.

    Its reader has checked the number of the other layers, so all after them are of this kind.
    """
    if options.load_model_type == "hf":
        return spec
    names = (name.split(".") for name in source.shapes if name.startswith("model.layers."))
    last = max(int(parts[2]) for parts in names)
    return replace(spec, num_mtp_layers=max(0, last + 1 - spec.num_layers))


def _check_copies(spec: ModelSpec, source: Source, copies: list[str]) -> None:
    """Check that tensors that Megatron holds once are equal where HF holds them twice.

    Raises:
        UsageError: They differ.
    """
    for name in copies:
        main = MTP_COPIES[name.split(".", 3)[-1]]
        main = main if main in source.shapes else "model.embed_tokens.weight"
        if not same_bits(source, name, source, source.dtype_of(name), main):
            raise UsageError(
                f"{source.place}: {name} differs from {main}; layers of multi-token prediction "
                "with an embedding of their own are not supported: --mtp-num-layers 0"
            )


def _plan(
    options: ConversionOptions,
    model: _Model,
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
) -> Target:
    spec = model.spec
    declared = whole_layout(spec, FileNames(), spec.vocab_size)
    cast = _DTYPES.get(options.params_dtype)
    fixed = {name for name in declared.hf_shapes if declared.dtype_of(name)}

    def dtype_of(name: str) -> torch.dtype:
        own = source.dtype_of(name)
        return own if cast is None or name in fixed else cast

    if options.save_model_type == "hf":
        target = plan_hf(shapes, dtype_of, int(options.max_shard_size_gb * 1e9))
        return replace(target, small={**target.small, **_side_files(options, model, target)})
    iteration = source.iteration
    divisor = options.make_vocab_size_divisible_by
    if options.ckpt_format == "torch_dist":
        modules = TRANSFORMER_ENGINE if options.transformer_impl != "local" else LOCAL
        padded = round_up(spec.vocab_size, divisor)
        layout = whole_layout(spec, distributed_names(spec, modules), padded)
        arguments = run_arguments(layout, ())
        record = asdict(_record(options, spec, iteration))
        return plan_distributed(layout, dtype_of, iteration, arguments, record, RECORD)
    layout, noop = classic_layout(options, spec)
    return plan_classic(layout, dtype_of, iteration, run_arguments(layout, noop))


def classic_layout(
    options: ConversionOptions, spec: ModelSpec
) -> tuple[CheckpointLayout, list[int]]:
    """Return the layout of a classic target, and its empty slots.

    Raises:
        UsageError: Sizes that do not fit the model or each other.
    """
    tp, pp = options.tensor_parallel, options.pipeline_parallel
    noop = layer_numbers("--noop-layers", options.noop_layers)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=pp,
        num_layer_list=options.num_layer_list,
        num_layers_per_virtual_pipeline_stage=options.num_layers_per_virtual_pipeline_stage,
    )
    stages = stage_layout(ModelConfig(noop_layers=options.noop_layers), parallel, spec.num_layers)
    etp = options.expert_tensor_parallel or tp
    if options.moe_tp_extend_ep and options.expert_tensor_parallel not in (None, 1):
        raise UsageError(
            f"--moe-tp-extend-ep makes experts whole; --expert-tensor-parallel-size {etp}: remove "
            "one of the two"
        )
    grid = classic_grid(stages, tp, options.expert_parallel, etp, options.moe_tp_extend_ep)
    names = mindspeed_names(
        spec,
        transformer_engine=options.transformer_impl == "transformer_engine",
        grouped=options.moe_grouped_gemm,
        split_up=options.mla_mm_split,
        mtp=options.mtp_num_layers > 0,
    )
    slots = filled_slots(spec.num_layers, pp, stages.vpp, noop) if noop else ()
    divisor = options.make_vocab_size_divisible_by
    extends = options.moe_tp_extend_ep
    return CheckpointLayout(spec, grid, divisor, names=names, slots=slots, extends_ep=extends), noop


def _record(options: ConversionOptions, spec: ModelSpec, iteration: int) -> CheckpointRecord:
    return CheckpointRecord(
        step=iteration,
        num_updates=0,
        model=json.loads(json.dumps(asdict(spec))),
        layout=dict.fromkeys(("tp", "pp", "cp", "dp", "vpp", "ep", "etp"), 1),
        optimizer="",
        has_rng=False,
        extra={CONVERTED: options.load_dir},
    )


def _side_files(options: ConversionOptions, model: _Model, target: Target) -> dict[str, bytes]:
    """Make the config and tokenizer files of a Hugging Face target."""
    keys: dict[str, Any] = dict(weight_table(model.spec.family).config_keys)
    if model.spec.num_mtp_layers and not options.mtp_num_layers:
        keys["num_nextn_predict_layers"] = 0
    dtype = target.dtypes["model.embed_tokens.weight"]
    files = {file.name: file.read_bytes() for file in side_files(model.directory, model.directory)}
    text = config_text(model.directory, dtype, keys, without=_QUANTISATION)
    return files | {"config.json": text.encode()}


def _reopen(options: ConversionOptions, model: _Model, out: Path) -> Source:
    """Open the result as a source."""
    if options.save_model_type == "hf":
        return open_hf(out, read_hf_config(out), "--save-dir")
    return open_megatron(out, model.spec, extends_ep=options.moe_tp_extend_ep)


def verify(source: Source, result: Source, target: Target, workers: int) -> None:
    """Compare all tensors bit by bit, in the element types of the result.

    Raises:
        UsageError: Some tensors differ.
    """

    def differs(name: str) -> bool:
        return not same_bits(source, name, result, target.dtypes[name])

    with ThreadPoolExecutor(max_workers=workers) as pool:
        names = list(target.dtypes)
        wrong = [name for name, bad in zip(names, pool.map(differs, names), strict=True) if bad]
    if wrong:
        raise UsageError(
            f"--verify: {len(wrong)} of {len(names)} tensors differ between source and result, "
            f"first {wrong[0]}; a disk that loses data, or a fault of this tool"
        )
