"""The folder of a run's checkpoints: which one to resume from, and how one becomes valid.

Layout::

    SAVE/latest_checkpointed_iteration.txt    newest step, for people and scripts
    SAVE/iter_0000012/checkpoint.json         the record: step, contents, every file, its checksum
    SAVE/iter_0000012/...                     tensors, written by the trainer
    SAVE/iter_0000013.partial/                a save in progress, or one that was killed
    SAVE/iter_0000009.damaged/                one that a run found damaged and went on without
    SAVE/iter_0000010.left/                   one of steps that an alarm made a run do again

A checkpoint is written as ``.partial`` and renamed when all ranks are done, so that after a kill at
any moment the previous checkpoint is still the newest valid one. Sizes and checksums in the record
reveal a folder that was only partly copied, and bytes that have changed. The first line of the
record is the checksum of the rest of it.
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
from types import MappingProxyType
from typing import Any

from mindspeed_rl.checkpoint.checksums import FileMark
from mindspeed_rl.core.digest import text_digest
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import sync_path, write_text_atomic

RECORD = "checkpoint.json"
NONFINITE = "nonfinite"
TRACKER = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"
DAMAGED = ".damaged"
LEFT = ".left"
#: Key in the extra state of a converted checkpoint, which has only weights.
CONVERTED = "converted_from"
_NAME = re.compile(r"iter_(\d{7,})")
_RECORD_DIGEST = "record_xxh3"
_HEAD = re.compile(rf'\{{\n "{_RECORD_DIGEST}": "([0-9a-f]{{32}})",\n')


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


def find_latest(
    directory: str | os.PathLike[str],
    unsound: Mapping[str, str] = MappingProxyType({}),
    before: int | None = None,
) -> Found:
    """Find the newest complete checkpoint of a folder; an empty folder has none.

    Contents of files other than the record are not read.

    Args:
        directory: Folder of a run's checkpoints.
        unsound: Names of checkpoints that are to be ignored, each with the reason.
        before: Step that has not been done yet in the checkpoint; ``None``: any may be.

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
    for path in reversed(checkpoints_of(root, before)):
        damage = unsound.get(path.name) or damage_of(path)
        if not damage:
            return Found(path, tuple(ignored))
        ignored.append(f"{path.name}: {damage}")
    return Found(None, tuple(ignored))


def checkpoints_of(root: Path, before: int | None = None) -> list[Path]:
    """List the checkpoint folders of a run by their step, whatever is in them.

    With ``before`` only those of earlier steps.
    """
    folders = [path for path in root.iterdir() if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted((f for f in folders if before is None or step_of(f) < before), key=step_of)


def complete_checkpoints(root: Path) -> list[Path]:
    """List the complete checkpoints of an existing folder, oldest first."""
    return [path for path in checkpoints_of(root) if not damage_of(path)]


def is_own(path: Path) -> bool:
    """Whether a checkpoint folder was made by this project: it has a record."""
    return (path / RECORD).is_file()


def remove(path: Path) -> None:
    """Remove a checkpoint; a kill meanwhile leaves a folder that the next save removes."""
    going = path.with_name(path.name + PARTIAL)
    path.rename(going)
    shutil.rmtree(going)


def sweep(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove what killed saves and removals left in a folder, and return the paths; on one rank.

    No other run may use the folder meanwhile.
    """
    root = Path(directory)
    leftovers = _partial_folders(root) if root.is_dir() else []
    for leftover in leftovers:
        shutil.rmtree(leftover)
    return leftovers


def damage_of(path: Path) -> str:
    """Describe what is missing in a checkpoint; empty when it is complete.

    The record is read whole; of other files only the sizes are looked at.
    """
    try:
        marks = marks_of(path)
        if other := _other_step(path):
            return other
    except FileNotFoundError:
        return f"no {RECORD}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{RECORD} is broken ({error or type(error).__name__})".replace("\n", " ")
    for name, mark in marks.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != mark.size_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {mark.size_bytes}"
    return ""


def _other_step(path: Path) -> str:
    """Say that a folder has the name of another step than its record; empty where it has not.

    Converted checkpoints have only weights, and any name of a step will do.
    """
    fields = json.loads((path / RECORD).read_text(encoding="utf-8"))
    step, extra = fields["step"], fields["extra"]
    if not _NAME.fullmatch(path.name) or CONVERTED in extra or step == step_of(path):
        return ""
    name = f"iter_{step:07d}"
    return f"it holds step {step} under the name of step {step_of(path)}: rename it to {name}"


def marks_of(path: Path) -> dict[str, FileMark]:
    """Return size and checksum of every file of a checkpoint, after the record's own is compared.

    Raises:
        OSError: The record cannot be read.
        ValueError, KeyError, TypeError, AttributeError, RecursionError: The record is damaged.
    """
    if not is_own(path):  # a pipe of that name would be waited for
        raise FileNotFoundError(path / RECORD)
    text = (path / RECORD).read_text(encoding="utf-8")
    marks = {n: FileMark.from_json(m) for n, m in json.loads(text)["files"].items()}
    if head := _HEAD.match(text):
        found = text_digest(text[head.end() :])
        if found != head[1]:
            raise ValueError(f"xxh3 {found} instead of {head[1]}")
    elif any(mark.xxh3 for mark in marks.values()):
        raise ValueError("its first line is not that of a record with checksums")
    return marks


def read_record(path: Path) -> CheckpointRecord:
    """Read the record of a complete checkpoint.

    Raises:
        UsageError: It was written by another version of this project.
    """
    text = (path / RECORD).read_text(encoding="utf-8")
    try:
        fields = json.loads(text, object_hook=_restored)
        del fields["files"]
        fields.pop(_RECORD_DIGEST, None)
        companions = {
            role: CompanionRecord(**kept) for role, kept in fields.pop("companions", {}).items()
        }
        record = CheckpointRecord(**fields, companions=companions)
        _check_types(record)
        return record
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path / RECORD} was written by another version of mindspeed_rl ({error}); resume "
            "with that version, or start from its exported Hugging Face checkpoint"
        ) from None


def _check_types(record: CheckpointRecord) -> None:
    """Refuse a record with values of other types than this version writes.

    Raises:
        TypeError: There is one.
    """
    kinds: dict[str, type] = {"step": int, "num_updates": int, "model": dict, "layout": dict}
    kinds |= {"optimizer": str, "has_rng": bool, "extra": dict}
    for name, kind in kinds.items():
        value = getattr(record, name)
        if type(value) is not kind:
            raise TypeError(f"{name} is of type {type(value).__name__}, not {kind.__name__}")


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
    sweep(root)
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"--save {root}: a checkpoint takes about {size_text(needed_bytes)} and "
            f"{size_text(free_bytes)} are free; earlier checkpoints are untouched",
        )
    partial = partial_path(root, step)
    partial.mkdir()
    return partial


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in the unit in which it is told from others of its size."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def partial_path(directory: str | os.PathLike[str], step: int) -> Path:
    """Return the path where the checkpoint after ``step`` is written before it is valid."""
    path = checkpoint_path(directory, step)
    return path.with_name(path.name + PARTIAL)


def set_aside(path: Path, mark: str = DAMAGED) -> Path:
    """Rename a checkpoint by ``mark``, so that a save of its step has room; return the new path."""
    number, target = 1, path.with_name(path.name + mark)
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}{mark}-{number}")
    path.rename(target)
    return target


def commit(
    directory: str | os.PathLike[str],
    record: CheckpointRecord,
    marks: Mapping[str, FileMark] = MappingProxyType({}),
) -> Path:
    """Make the folder of :func:`begin` a valid checkpoint; on one rank, when all have written.

    Args:
        directory: Folder of the run's checkpoints.
        record: What the checkpoint holds.
        marks: Marks of files that their writers have flushed to disk, by path in the checkpoint;
            other files are flushed and read here.

    Raises:
        UsageError: A complete checkpoint of this step exists.
    """
    partial = partial_path(directory, record.step)
    target = checkpoint_path(directory, record.step)
    found = {}
    for file in sorted(partial.rglob("*")):
        name = str(file.relative_to(partial))
        if file.is_file() and name not in marks:
            sync_path(file)
        if file.is_file():
            found[name] = (marks.get(name) or FileMark.of(file)).to_json()
    fields = _finite({**asdict(record), "files": found})
    body = json.dumps(fields, indent=1, allow_nan=False).removeprefix("{\n") + "\n"
    head = f'{{\n "{_RECORD_DIGEST}": "{text_digest(body)}",\n'
    write_text_atomic(partial / RECORD, head + body)
    if target.exists():
        if not damage_of(target):
            raise UsageError(f"--save: {target} exists already; choose another folder")
        set_aside(target)
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
