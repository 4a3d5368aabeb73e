"""The folder of a run's checkpoints: which one to resume from, and how one becomes valid.

Layout::

    SAVE/latest_checkpointed_iteration.txt    newest step, for people and scripts
    SAVE/iter_0000012/checkpoint.json         the record: step, contents, every file and its size
    SAVE/iter_0000012/...                     tensors, written by the trainer
    SAVE/iter_0000013.partial/                a save in progress, or one that was killed

A checkpoint is written as ``.partial`` and renamed when all ranks are done, so that after a kill at
any moment the previous checkpoint is still the newest valid one. The sizes in the record also
reveal a folder that was only partly copied.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import sync_path, write_text_atomic

RECORD = "checkpoint.json"
NONFINITE = "nonfinite"
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"
#: Key in the extra state of a converted checkpoint, which has only weights.
CONVERTED = "converted_from"
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class CompanionRecord:
    """Contents of a checkpoint for a model besides the policy; fields as in the main record."""

    num_updates: int
    model: Mapping[str, Any]
    optimizer: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Origin and contents of a checkpoint.

    Attributes:
        step: Number of steps of the run that are done.
        num_updates: Optimizer updates that are done: the position of the learning-rate schedule.
        model: Numbers of the architecture.
        layout: ``tp``, ``pp``, ``cp``, ``dp`` of the ranks that wrote it.
        optimizer: Kind of the optimizer state; empty when it was left out.
        has_rng: Whether random states are in it.
        extra: State of the run beyond the trainer, as JSON.
        companions: Role -> record of a model besides the policy, in a folder of that name.
    """

    step: int
    num_updates: int
    model: Mapping[str, Any]
    layout: Mapping[str, int]
    optimizer: str
    has_rng: bool
    extra: Mapping[str, Any]
    companions: Mapping[str, CompanionRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint (``None``: there is none), and reasons for ignoring others."""

    path: Path | None
    ignored: tuple[str, ...]


def checkpoint_path(directory: str | os.PathLike[str], step: int) -> Path:
    """Return the path of the checkpoint after ``step``, in Megatron's naming."""
    return Path(directory) / f"iter_{step:07d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint folder is named after."""
    match = _NAME.fullmatch(path.name)
    assert match, f"{path} is not a checkpoint folder"
    return int(match[1])


def find_latest(directory: str | os.PathLike[str]) -> Found:
    """Find the newest complete checkpoint of a folder; an empty folder has none.

    Raises:
        UsageError: The folder does not exist.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UsageError(
            f"--load {root}: no such directory; name the --save folder of a run, or leave --load "
            "out to start from --hf-checkpoint"
        )
    ignored = [f"{path.name}: its save did not finish" for path in _partial_folders(root)]
    folders = [path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    for path in sorted(folders, key=step_of, reverse=True):
        damage = damage_of(path)
        if not damage:
            return Found(path, tuple(ignored))
        ignored.append(f"{path.name}: {damage}")
    return Found(None, tuple(ignored))


def damage_of(path: Path) -> str:
    """Describe what is missing in a checkpoint; empty when it is complete."""
    try:
        files = json.loads((path / RECORD).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"no {RECORD}"
    except (ValueError, KeyError, TypeError):
        return f"{RECORD} is broken"
    for name, size_bytes in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {size_bytes}"
    return ""


def read_record(path: Path) -> CheckpointRecord:
    """Read the record of a complete checkpoint.

    Raises:
        UsageError: It was written by another version of this project.
    """
    text = (path / RECORD).read_text(encoding="utf-8")
    fields = json.loads(text, object_hook=_restored)
    del fields["files"]
    try:
        companions = {
            role: CompanionRecord(**kept) for role, kept in fields.pop("companions", {}).items()
        }
        return CheckpointRecord(**fields, companions=companions)
    except TypeError as error:
        raise UsageError(
            f"{path / RECORD} was written by another version of mindspeed_rl ({error}); resume "
            "with that version, or start from its exported Hugging Face checkpoint"
        ) from None


def refuse_other_run(directory: str | os.PathLike[str], start_step: int) -> None:
    """Refuse to write among the checkpoints of another run.

    Raises:
        UsageError: ``--save`` holds a complete checkpoint of a later step than this run starts at,
            or one of another tool, which a save of the same step would replace.
    """
    if foreign := _foreign_folders(Path(directory)):
        raise UsageError(
            f"--save {directory} holds {foreign[0].name}, which another tool wrote; choose another "
            "folder"
        )
    newest = find_latest(directory).path if Path(directory).is_dir() else None
    if newest is not None and step_of(newest) > start_step:
        raise UsageError(
            f"--save {directory} holds {newest.name} already, and this run starts after step "
            f"{start_step}: add --load {directory} to go on from there, or choose another folder"
        )


def _foreign_folders(root: Path) -> list[Path]:
    """List the checkpoints of Megatron-LM or MindSpeed-LLM in a folder."""
    return [
        path
        for path in sorted(root.glob("iter_*"))
        if not (path / RECORD).is_file()
        and (any(path.glob("mp_rank_*")) or (path / "metadata.json").is_file())
    ]


def begin(directory: str | os.PathLike[str], step: int, needed_bytes: int) -> Path:
    """Make the folder that a checkpoint is written into; on one rank.

    Leftovers of killed saves are removed.

    Raises:
        OSError: The file system has less than ``needed_bytes`` free.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in _partial_folders(root):
        shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"--save {root}: a checkpoint takes about {needed_bytes / 2**30:.1f} GiB and "
            f"{free_bytes / 2**30:.1f} GiB are free; earlier checkpoints are untouched",
        )
    partial = partial_path(root, step)
    partial.mkdir()
    return partial


def partial_path(directory: str | os.PathLike[str], step: int) -> Path:
    """Return the path where the checkpoint after ``step`` is written before it is valid."""
    path = checkpoint_path(directory, step)
    return path.with_name(path.name + PARTIAL)


def commit(directory: str | os.PathLike[str], record: CheckpointRecord) -> Path:
    """Make the folder of :func:`begin` a valid checkpoint; on one rank, when all have written.

    Raises:
        UsageError: A complete checkpoint of this step exists.
    """
    partial = partial_path(directory, record.step)
    target = checkpoint_path(directory, record.step)
    files = {
        str(file.relative_to(partial)): file.stat().st_size
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    for name in files:
        sync_path(partial / name)
    fields = _finite({**asdict(record), "files": files})
    text = json.dumps(fields, indent=1, allow_nan=False)
    write_text_atomic(partial / RECORD, text + "\n")
    if target.exists():
        if not damage_of(target):
            raise UsageError(f"--save: {target} exists already; choose another folder")
        shutil.rmtree(target)
    partial.rename(target)
    sync_path(target.parent)
    write_text_atomic(target.parent / TRACKER, f"{record.step}\n")
    return target


def _finite(value: Any) -> Any:
    """Replace NaN, the reward of an open response, and infinities by objects that JSON has."""
    if isinstance(value, Mapping):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return {NONFINITE: str(value)} if isinstance(value, float) and not isfinite(value) else value


def _restored(fields: dict[str, Any]) -> Any:
    """Invert :func:`_finite` for an object of JSON."""
    return float(fields[NONFINITE]) if fields.keys() == {NONFINITE} else fields


def _partial_folders(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.iterdir())
        if path.is_dir() and path.suffix == PARTIAL and _NAME.fullmatch(path.stem)
    ]
