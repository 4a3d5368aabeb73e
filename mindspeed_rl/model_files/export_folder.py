"""The folder of an export: beside its target until every file is there, then in its place."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.checkpoint.side_files import config_text, side_files
from mindspeed_rl.config.outputs import (
    EXPORT_RECORD,
    export_record,
    exported_files,
    refuse_foreign_target,
)
from mindspeed_rl.convert.target import OutputFile
from mindspeed_rl.core.files import sync_path
from mindspeed_rl.models.hf_files import INDEX, index_text

_NUMBER = re.compile(r"\d+$")


@dataclass(frozen=True)
class ExportFolder:
    """The files of an export besides its weights, and the names of all of them. Local.

    Attributes:
        target: Directory of the export; an earlier export is replaced, anything else is refused.
        source: Directory whose config files are copied; never written to.
        dtype: Element type of the model, written into config.json.
        step: Number of steps of the run that produced the weights, for the record.
        tokenizer: Directory whose tokenizer files are copied, and no others.
        config_keys: Keys of config.json that the export has to set.
    """

    target: Path
    source: Path
    dtype: torch.dtype
    step: int
    tokenizer: Path
    config_keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        """The folder in which files are written; it stays when an export is cut off."""
        return self.target.with_name(f".{self.target.name}.partial")

    def prepare(self, names: Collection[str]) -> None:
        """Make the working folder, and keep of an earlier attempt only files of these names.

        An earlier export that lost its name, as its successor was killed before it took it, gets it
        back.

        Raises:
            UsageError: The target exists and is no export.
            OSError: The folder cannot be made.
        """
        refuse_foreign_target(self.target)
        with self.explained():
            self._restore()
            self.work.mkdir(parents=True, exist_ok=True)
            for path in self.work.iterdir():
                if path.name not in names:
                    path.unlink()

    def finish(self, files: Sequence[OutputFile]) -> None:
        """Write all other files and rename the folder to the target.

        Args:
            files: Files of weights, which are whole.

        Raises:
            OSError: A file could not be written; the files of weights and an earlier export stay.
        """
        with self.explained():
            if len(files) > 1:
                file_of = {tensor.name: file.path for file in files for tensor in file.tensors}
                text = index_text(file_of, sum(file.num_bytes for file in files))
                (self.work / INDEX).write_text(text)
            for file in side_files(self.source, self.tokenizer):
                shutil.copyfile(file, self.work / file.name)
            text = config_text(self.source, self.dtype, self.config_keys)
            (self.work / "config.json").write_text(text)
            record = export_record(self.step, [file.name for file in self.work.iterdir()])
            (self.work / EXPORT_RECORD).write_text(json.dumps(record, indent=2))
            for path in self.work.iterdir():
                sync_path(path)
            self._rename()

    def _restore(self) -> None:
        """Give a whole export its name back that a kill between two renames left without one."""
        if self.target.exists() or not self.target.parent.exists():
            return
        olds = [p for p in self.target.parent.iterdir() if _NUMBER.sub("", p.name) == self._old]
        whole = [old for old in olds if _is_whole_export(old)]
        if len(whole) == 1:
            os.rename(whole[0], self.target)
            sync_path(self.target.parent)

    @property
    def _old(self) -> str:
        """Name of an earlier export while the new one takes its place, without a number."""
        return f".{self.target.name}.old"

    def _rename(self) -> None:
        sync_path(self.work)
        old = self.target.with_name(f"{self._old}{os.getpid()}")
        if self.target.exists():
            os.rename(self.target, old)
        os.rename(self.work, self.target)
        sync_path(self.target.parent)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explain errors of the file system by what they mean for the export."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"--export-hf {self.target}: writing failed: {error}. The checkpoint it came from "
                f"and an earlier export are as they were; whole files stay in {self.work} and are "
                "not written again. Free space, then resume the run with --load; or choose "
                "another directory and remove that one"
            ) from error


def _is_whole_export(folder: Path) -> bool:
    """Tell whether a folder has all files of an export; one that was half removed has not."""
    files = exported_files(folder)
    return bool(files) and all((folder / name).exists() for name in files or ())
