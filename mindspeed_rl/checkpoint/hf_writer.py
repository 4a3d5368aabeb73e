"""Writing of Hugging Face checkpoints into a temporary directory, which is renamed at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mindspeed_rl.config.outputs import EXPORT_RECORD, export_record, refuse_foreign_target
from mindspeed_rl.core.files import sync_path
from mindspeed_rl.models.hf_code import code_files
from mindspeed_rl.models.hf_files import INDEX, VOCABULARY_FILES, index_text, shard_names

# Files of a checkpoint directory that describe the model rather than hold weights.
_CONFIG_FILES = ("config.json", "generation_config.json")
_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    *VOCABULARY_FILES,
)


class HfWriter:
    """Writes a sharded safetensors checkpoint next to its target and renames it when complete.

    Use it as a context manager; leaving it through an exception removes what was written. Entering
    it raises ``ValueError`` when the target exists and is no export.

    Args:
        target: Directory to create; an earlier export is replaced, anything else is refused.
        source: Directory whose config files are copied; never written to.
        dtype: Element type of the model, written into config.json.
        step: Number of steps of the run that produced the weights, for the record.
        tokenizer: Directory whose tokenizer files are copied, and no others; empty: ``source``.
        config_keys: Keys of config.json that the export has to set.
        shard_bytes: Size at which a new file begins.

    Raises:
        OSError: A file could not be written (full disk). The source and an earlier export are
            unchanged, and nothing of this export is left.
    """

    def __init__(
        self,
        target: str | Path,
        source: str | Path,
        dtype: torch.dtype,
        *,
        step: int,
        tokenizer: str | Path = "",
        config_keys: Mapping[str, Any] | None = None,
        shard_bytes: int = 4 << 30,
    ) -> None:
        self._target = Path(target)
        self._source = Path(source)
        self._tokenizer = Path(tokenizer or source)
        self._dtype = dtype
        self._step = step
        self._config_keys = dict(config_keys or {})
        self._shard_bytes = shard_bytes
        self._work = self._target.with_name(f".{self._target.name}.tmp{os.getpid()}")
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def __enter__(self) -> HfWriter:
        refuse_foreign_target(self._target)
        with self._explained():
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one whole tensor, in its own element type."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            with self._explained():
                self._flush()
        self._pending[name] = tensor.detach().to("cpu").contiguous()
        self._pending_bytes += size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                with self._explained():
                    self._finish()
        finally:
            shutil.rmtree(self._work, ignore_errors=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain errors of the file system by what they mean for the export."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"--export-hf {self._target}: writing failed: {error}. Nothing of this export is "
                "left, and the checkpoint it came from and an earlier export are as they were; "
                "free space or choose another directory, then resume the run with --load"
            ) from error

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        self._name_files()
        self._copy_side_files()
        self._write_record()
        for file in self._work.iterdir():
            shutil.copymode(self._work / "config.json", file)  # safetensors' files are private
            sync_path(file)
        sync_path(self._work)
        old = self._target.with_name(f".{self._target.name}.old{os.getpid()}")
        if self._target.exists():
            os.rename(self._target, old)
        os.rename(self._work, self._target)
        sync_path(self._target.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _flush(self) -> None:
        file = self._work / f"part-{len(self._files):05d}.safetensors"
        save_file(self._pending, str(file), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _name_files(self) -> None:
        """Rename the files, to one file or to shards with an index, once their number is known."""
        file_of: dict[str, str] = {}
        for i, name in enumerate(shard_names(len(self._files))):
            os.rename(self._work / f"part-{i:05d}.safetensors", self._work / name)
            file_of |= dict.fromkeys(self._files[i], name)
        if len(self._files) > 1:
            (self._work / INDEX).write_text(index_text(file_of, self._total_bytes))

    def _write_record(self) -> None:
        record = export_record(self._step, [file.name for file in self._work.iterdir()])
        (self._work / EXPORT_RECORD).write_text(json.dumps(record, indent=2))

    def _copy_side_files(self) -> None:
        for file in side_files(self._source, self._tokenizer):
            shutil.copyfile(file, self._work / file.name)
        text = config_text(self._source, self._dtype, self._config_keys)
        (self._work / "config.json").write_text(text)


def side_files(source: Path, tokenizer: Path) -> list[Path]:
    """List the config files of ``source``, the tokenizer files of ``tokenizer``, and their code.

    Raises:
        UsageError: Code that the config or the tokenizer names is missing.
    """
    folders = ((source, _CONFIG_FILES), (tokenizer, _TOKENIZER_FILES))
    files = [folder / name for folder, names in folders for name in names]
    return [file for file in files if file.is_file()] + code_files(source, tokenizer)


def config_text(
    source: Path, dtype: torch.dtype, keys: Mapping[str, Any], without: Collection[str] = ()
) -> str:
    """Make the ``config.json`` of a checkpoint that is derived from another one.

    Args:
        source: Directory of the other checkpoint.
        dtype: Element type of the weights.
        keys: Keys to set.
        without: Keys to leave out.
    """
    config = json.loads((source / "config.json").read_text())
    # transformers 5 writes "dtype"; earlier versions read only "torch_dtype".
    for key in {"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}:
        config[key] = str(dtype).removeprefix("torch.")
    kept = {key: value for key, value in config.items() if key not in without}
    return json.dumps(kept | dict(keys), indent=2)
