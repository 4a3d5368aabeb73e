"""Inspects checkpoints for people: what is sound, what is damaged, what cannot be known. Local."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.checksums import compare
from mindspeed_rl.checkpoint.metadata_files import FORMAT_FILE, has_arguments, problem_of_metadata
from mindspeed_rl.core.errors import UsageError

_THREADS = 8


class Verdict(Enum):
    """The state of a checkpoint."""

    SOUND = "sound"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Inspected:
    """A sentence about a checkpoint or about one of its files."""

    verdict: Verdict
    text: str


def inspect_checkpoints(directory: Path) -> list[Inspected]:
    """Inspect a checkpoint, or every checkpoint of a folder; all bytes are read.

    Raises:
        UsageError: There is no such folder, or no checkpoint in it.
    """
    if not directory.is_dir():
        raise UsageError(f"--checkpoint {directory}: no such directory; name a checkpoint "
                         "(SAVE/iter_0000012) or the --save folder of a run")  # fmt: skip
    if resume.is_own(directory) or (directory / FORMAT_FILE).is_file():
        return inspect_checkpoint(directory)
    folders = resume.checkpoints_of(directory)
    if not folders:
        raise UsageError(
            f"--checkpoint {directory}: neither a checkpoint (no {resume.RECORD}) nor a folder "
            "with checkpoints (no iter_*); name the --save folder of a run or a folder in it"
        )
    return [finding for folder in folders for finding in inspect_checkpoint(folder)]


def inspect_checkpoint(folder: Path) -> list[Inspected]:
    """Inspect one checkpoint: a finding for each damage, or one that says that it is sound."""
    if not resume.is_own(folder):
        return _of_another_tool(folder)
    if damage := resume.damage_of(folder):
        return [Inspected(Verdict.DAMAGED, f"{folder}: {damage}")]
    marks = resume.marks_of(folder)
    hashed = [name for name, mark in marks.items() if mark.xxh3]
    threads = min(_THREADS, os.cpu_count() or 1)
    problems = compare(folder, marks, hashed, threads)
    if not problems:
        parts = sorted(part for part in folder.iterdir() if part.is_dir())
        told = {part: problem_of_metadata(part) for part in (folder, *parts)}
        problems = [f"{part.name}: {problem}" for part, problem in told.items() if problem]
    if problems:
        return [Inspected(Verdict.DAMAGED, f"{folder}: {problem}") for problem in problems]
    total = sum(mark.size_bytes for mark in marks.values()) / 2**20
    if not hashed:
        what = f"{folder}: {len(marks)} files are there, {total:.1f} MiB, without checksums: "
        return [Inspected(Verdict.UNKNOWN, what + "whether their bytes changed is not known")]
    what = f"{folder}: sound, {len(hashed)} files of {total:.1f} MiB have their checksums"
    return [Inspected(Verdict.SOUND, what)]


def _of_another_tool(folder: Path) -> list[Inspected]:
    if why := _lost_record(folder):
        what = f"{folder}: {resume.RECORD} is missing, and {why}: nothing of it can be verified"
        return [Inspected(Verdict.DAMAGED, f"{what}, and no run loads it")]
    if not (folder / FORMAT_FILE).is_file():
        what = f"{folder}: of another tool or cut short: no {resume.RECORD}"
        return [Inspected(Verdict.UNKNOWN, what)]
    if problem := problem_of_metadata(folder):
        return [Inspected(Verdict.DAMAGED, f"{folder}: {problem}")]
    what = f"{folder}: of another tool, without checksums; metadata is whole"
    return [Inspected(Verdict.UNKNOWN, what)]


def _lost_record(folder: Path) -> str:
    """Say why a checkpoint without a record is one of a run of this project; empty: it is not.

    Megatron-LM and MindSpeed-LLM keep the same file with the newest step; their folders of tensors
    hold the arguments of the run, which ours do not.
    """
    root = folder.absolute().parent
    owned = [path.name for path in resume.checkpoints_of(root) if resume.is_own(path)]
    if owned:
        return f"{owned[-1]} beside it is a checkpoint of this tool"
    if (root / resume.TRACKER).is_file() and not has_arguments(folder):
        return f"{root.name}/{resume.TRACKER} is that of a run"
    return ""
