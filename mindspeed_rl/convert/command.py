"""The steps of ``tools/convert_checkpoint.py``, from options to a finished checkpoint."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from mindspeed_rl.checkpoint.names import check_names, mtp_tensors
from mindspeed_rl.config.layouts import layer_numbers
from mindspeed_rl.convert.checkpoint_files import whole_layout
from mindspeed_rl.convert.format import Format, LayoutFlags, Request
from mindspeed_rl.convert.formats import open_checkpoint, target_format
from mindspeed_rl.convert.hf import QUANTISATION
from mindspeed_rl.convert.options import MODEL_TYPES, CheckpointFlags, ConversionOptions
from mindspeed_rl.convert.run import convert
from mindspeed_rl.convert.source import Source, same_bits
from mindspeed_rl.convert.target import Target
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag_names
from mindspeed_rl.models.param_names import MTP_COPIES, ParamNames
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec, read_hf_config

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Layout flags that are read for sources and checks as well, whatever the target is.
_ALWAYS_READ = frozenset({"moe_tp_extend_ep", "noop_layers"})
Log = Callable[[str], None]


def run_conversion(options: ConversionOptions, log: Log) -> None:
    """Convert a checkpoint; ``log`` receives one line per step.

    Raises:
        UsageError: Flags, files or a model that cannot be converted.
        OSError: A file cannot be read or written.
    """
    start = time.monotonic()
    flags, layout, work = options.checkpoint, options.layout, options.work
    config_dir, target_dir = _directories(flags)
    spec = _spec(flags, config_dir)
    format = target_format(flags.save_model_type, flags.ckpt_format)
    _check_flags(flags, layout, format, spec)
    extends_ep = layout.moe_tp_extend_ep
    source = open_checkpoint(
        Path(flags.load_dir), flags.load_model_type, spec, extends_ep=extends_ep
    )
    shapes = _wanted(flags, spec, source, log)
    request = Request(
        spec,
        config_dir,
        source,
        shapes,
        cast=_DTYPES.get(flags.params_dtype),
        keeps_mtp=flags.mtp_num_layers > 0,
        shard_bytes=int(work.max_shard_size_gb * 1e9),
        layout=layout,
    )
    with _flags_of_the_target():
        target = format.plan(request)
    if unused := _unused(layout, format):
        log(f"without effect, this target has no layout: {', '.join(unused)}")
    log(
        f"{source.kind}: {flags.load_dir} -> {target_dir}: {len(target.dtypes)} tensors, "
        f"{len(target.files)} files, {target.num_bytes / 1e9:.2f} GB"
    )

    def check(out: Path) -> None:
        if work.verify:
            result = open_checkpoint(out, format.model_type, spec, extends_ep=extends_ep)
            verify(source, result, target, work.num_threads)

    with tqdm(
        total=target.num_bytes,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=work.no_progress or None,
    ) as bar:
        kept = convert(
            source, target, target_dir, workers=work.num_threads, advance=bar.update, check=check
        )
    if kept:
        log(f"resumed: {kept / 1e9:.2f} GB were written before")
    if work.verify:
        log(f"verified: {len(target.dtypes)} tensors are bit-equal in source and result")
    log(f"done in {time.monotonic() - start:.1f} s: {target_dir}")


@contextmanager
def _flags_of_the_target() -> Iterator[None]:
    """Name the flags of a layout in errors as the help does, and not as training does."""
    try:
        yield
    except UsageError as error:
        names = {
            name: flag_names(field)[0]
            for field in fields(LayoutFlags)
            for name in flag_names(field)[1:]
        }
        training = re.compile("|".join(map(re.escape, names)))
        renamed = (training.sub(lambda m: names[m[0]], text) for text in error.mistakes)
        raise UsageError(*renamed) from error


def _unused(layout: LayoutFlags, format: Format) -> list[str]:
    """List the layout flags that were given but that a target of this format does not read."""
    return [
        flag_names(field)[0]
        for field in fields(layout)
        if field.name not in format.layout_flags | _ALWAYS_READ
        and getattr(layout, field.name) != field.default
    ]


def _directories(flags: CheckpointFlags) -> tuple[Path, Path]:
    """Return the directory of the config and the directory of the result."""
    for name, value in (("--load-dir", flags.load_dir), ("--save-dir", flags.save_dir)):
        if not value:
            raise UsageError(f"{name} is required: give a directory")
    source, target = Path(flags.load_dir), Path(flags.save_dir)
    if not source.is_dir():
        raise UsageError(f"--load-dir {source}: no such directory")
    if flags.load_model_type == "hf":
        config = source
    elif flags.hf_cfg_dir:
        config = Path(flags.hf_cfg_dir)
    elif (target / "config.json").is_file() and flags.save_model_type == "hf":
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


def _spec(flags: CheckpointFlags, directory: Path) -> ModelSpec:
    flag = "--load-dir" if flags.load_model_type == "hf" else "--hf-cfg-dir"
    config = read_hf_config(directory, flag=flag)
    return spec_from_hf_config({key: config[key] for key in config if key != QUANTISATION})


def _check_flags(
    flags: CheckpointFlags, layout: LayoutFlags, format: Format, spec: ModelSpec
) -> None:
    """Check the flags that repeat what config.json says.

    Raises:
        UsageError: They contradict it, or refer to parts that the model does not have.
    """
    families = MODEL_TYPES.get(flags.model_type_hf, (spec.family,))
    if flags.model_type_hf and flags.model_type_hf not in MODEL_TYPES:
        raise UsageError(
            f"--model-type-hf {flags.model_type_hf} is not supported; allowed: "
            f"{', '.join(MODEL_TYPES)}, or leave it out: config.json says it"
        )
    if spec.family not in families:
        raise UsageError(
            f"--model-type-hf {flags.model_type_hf}: config.json is of a {spec.family} model"
        )
    noop = layer_numbers("--noop-layers", layout.noop_layers)
    allowed = sorted({spec.num_layers, spec.num_layers + len(noop)})
    if flags.num_layers is not None and flags.num_layers not in allowed:
        raise UsageError(
            f"--num-layers {flags.num_layers}: config.json has {spec.num_layers} layers"
            + (f", {allowed[-1]} with --noop-layers" if noop else "")
        )
    dense = next(iter(spec.expert_layers), 0)
    if flags.first_k_dense_replace not in (None, dense):
        raise UsageError(
            f"--first-k-dense-replace {flags.first_k_dense_replace}: config.json has {dense}"
        )
    if flags.mtp_num_layers not in (0, spec.num_mtp_layers):
        raise UsageError(
            f"--mtp-num-layers {flags.mtp_num_layers}: config.json has {spec.num_mtp_layers} "
            "(num_nextn_predict_layers); allowed: that, or 0 to leave them out"
        )
    if flags.mtp_num_layers and not format.writes_mtp:
        raise UsageError(
            f"--mtp-num-layers with --ckpt-format {format.name} is not supported; use another "
            "--ckpt-format, or 0"
        )
    given = (
        ("--moe-tp-extend-ep", layout.moe_tp_extend_ep, spec.moe),
        ("--target-expert-parallel-size", layout.expert_parallel > 1, spec.moe),
        ("--mla-mm-split", layout.mla_mm_split, spec.latent_attention),
    )
    for flag, on, has in given:
        if on and not has:
            raise UsageError(f"{flag}: the {spec.family} model has nothing to cut so; remove it")


def _wanted(
    flags: CheckpointFlags, spec: ModelSpec, source: Source, log: Log
) -> dict[str, tuple[int, ...]]:
    """Return the HF tensors of the result with their shapes, in the order of the table.

    Raises:
        UsageError: The source has unknown tensors, lacks some, or has some in other shapes.
    """
    keeps = flags.mtp_num_layers > 0
    table = whole_layout(spec, ParamNames(mtp=keeps), spec.vocab_size).hf_shapes
    mtp = mtp_tensors(_with_mtp(flags, spec, source), source.shapes)
    copies = [name for name in mtp if name.split(".", 3)[-1] in MTP_COPIES]
    left_out = set(copies if keeps else mtp)
    check_names(f"--load-dir {flags.load_dir}", set(source.shapes) - left_out, table)
    if mtp and not keeps:
        hint = f"; --mtp-num-layers {spec.num_mtp_layers} keeps them" if spec.num_mtp_layers else ""
        log(f"left out: {len(mtp)} tensors of multi-token prediction{hint}")
    for name, shape in table.items():
        if source.shapes[name] != shape:
            raise UsageError(
                f"--load-dir {flags.load_dir}: {name} has shape {source.shapes[name]}, "
                f"config.json implies {shape}; give the config.json and the weights of one model"
            )
    if not keeps:
        return dict(table)
    _check_copies(source, copies)
    return dict(table) | {name: source.shapes[name] for name in copies}


def _with_mtp(flags: CheckpointFlags, spec: ModelSpec, source: Source) -> ModelSpec:
    """Return the spec with the multi-token-prediction layers that a Megatron source has.

    Its reader has checked the number of the other layers, so all after them are of this kind.
    """
    if flags.load_model_type == "hf":
        return spec
    names = (name.split(".") for name in source.shapes if name.startswith("model.layers."))
    last = max(int(parts[2]) for parts in names)
    return replace(spec, num_mtp_layers=max(0, last + 1 - spec.num_layers))


def _check_copies(source: Source, copies: list[str]) -> None:
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
