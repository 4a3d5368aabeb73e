"""Hugging Face checkpoints: read just the slices a rank needs, write shards safely (layer 1)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mindspeed_rl.config.outputs import EXPORT_RECORD, export_record, refuse_foreign_target
from mindspeed_rl.resharding.layouts.base import Piece, ShardLayout, pieces_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Files of a checkpoint directory that describe the model rather than hold weights.
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def weight_files(directory: str | Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file that holds it.

    Raises:
        ValueError: no safetensors weights, a missing shard, or an unreadable one.
    """
    root = Path(directory)
    index = root / INDEX
    if index.is_file():
        mapping = json.loads(index.read_text())["weight_map"]
        missing = sorted({f for f in mapping.values() if not (root / f).is_file()})
        if missing:
            raise ValueError(f"--hf-checkpoint {root}: {INDEX} names missing files {missing[:3]}")
        return {name: root / file for name, file in mapping.items()}
    single = root / SINGLE
    if not single.is_file():
        raise ValueError(f"--hf-checkpoint {root}: neither {INDEX} nor {SINGLE} is there")
    with _open(single) as file:
        return {name: single for name in file.keys()}  # noqa: SIM118 - not a dict


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safe_open(str(path), framework="pt")
    except Exception as error:
        raise ValueError(f"{path}: unreadable safetensors file: {error}") from error
    with handle as file:
        yield file


@torch.no_grad()
def load_hf(
    directory: str | Path,
    layout: ShardLayout,
    rank: int,
    params: Mapping[str, torch.Tensor],
) -> None:
    """Fill this rank's parameters from a checkpoint, reading only its own rectangles. Local.

    Padding rows (a padded vocabulary) become 0.

    Args:
        directory: with safetensors weights.
        layout: where this rank keeps what.
        rank: global rank.
        params: local parameters by name; written in place, cast to their dtype.

    Raises:
        ValueError: tensors that are missing, superfluous or of another shape.
    """
    files = weight_files(directory)
    _check_names(directory, layout, files)
    by_file: dict[Path, list[str]] = {}
    for name in layout.hf_shapes:
        by_file.setdefault(files[name], []).append(name)
    mine: dict[str, list[Piece]] = {}
    for shard in pieces_of(layout, rank):
        mine.setdefault(shard.piece.hf_name, []).append(shard.piece)
    for param in params.values():
        param.zero_()
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                view = file.get_slice(name)
                shape = tuple(view.get_shape())
                if shape != tuple(layout.hf_shapes[name]):
                    raise ValueError(
                        f"{path}: {name} has shape {shape}, config.json implies "
                        f"{tuple(layout.hf_shapes[name])}"
                    )
                for piece in mine.get(name, ()):
                    target = piece.view.of(params[piece.param])[piece.param_box.slices]
                    target.copy_(view[piece.hf_box.slices])


def _check_names(directory: str | Path, layout: ShardLayout, files: Mapping[str, Path]) -> None:
    missing = sorted(set(layout.hf_shapes) - set(files))
    # transformers writes the head of a tied model only sometimes; it is the embedding again
    extra = sorted(set(files) - set(layout.hf_shapes) - {"lm_head.weight"})
    if missing or extra:
        raise ValueError(
            f"--hf-checkpoint {directory}: weights do not match config.json; missing "
            f"{missing[:3]}, unknown {extra[:3]}"
        )


class HfWriter:
    """Writes a sharded safetensors checkpoint next to its target and renames it when complete.

    Use as a context manager; leaving it through an exception removes what was written. Entering it
    raises ``ValueError`` when the target exists and is no export.

    Args:
        target: directory to create; an earlier export is replaced, anything else is refused.
        source: directory whose config and tokenizer files are copied.
        dtype: element type of the weights, written into config.json.
        step: steps of the run that the weights come from, for the record.
        shard_bytes: size at which a new file begins.
    """

    def __init__(
        self,
        target: str | Path,
        source: str | Path,
        dtype: torch.dtype,
        *,
        step: int,
        shard_bytes: int = 4 << 30,
    ) -> None:
        self._target = Path(target)
        self._source = Path(source)
        self._dtype = dtype
        self._step = step
        self._shard_bytes = shard_bytes
        self._work = self._target.with_name(f".{self._target.name}.tmp{os.getpid()}")
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> HfWriter:
        refuse_foreign_target(self._target)
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one whole tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", self._dtype).contiguous()
        self._pending_bytes += size

    def _flush(self) -> None:
        file = self._work / f"part-{len(self._files):05d}.safetensors"
        save_file(self._pending, str(file), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            return
        if self._pending:
            self._flush()
        self._name_files()
        self._copy_side_files()
        self._write_record()
        old = self._target.with_name(f".{self._target.name}.old{os.getpid()}")
        if self._target.exists():
            os.rename(self._target, old)
        os.rename(self._work, self._target)
        shutil.rmtree(old, ignore_errors=True)

    def _name_files(self) -> None:
        """Names as transformers expects them: one file, or numbered shards with an index."""
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._files):
            name = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self._work / f"part-{i:05d}.safetensors", self._work / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._work / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

    def _write_record(self) -> None:
        record = export_record(self._step, [file.name for file in self._work.iterdir()])
        (self._work / EXPORT_RECORD).write_text(json.dumps(record, indent=2))

    def _copy_side_files(self) -> None:
        for name in _SIDE_FILES:
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, self._work / name)
        config = json.loads((self._source / "config.json").read_text())
        for key in ("torch_dtype", "dtype"):
            if key in config:
                config[key] = str(self._dtype).removeprefix("torch.")
        (self._work / "config.json").write_text(json.dumps(config, indent=2))
