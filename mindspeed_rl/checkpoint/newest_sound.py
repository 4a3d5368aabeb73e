"""Chooses the checkpoint to load: the newest whose bytes are those that were written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.checksums import FileMark, compare, share_of_files
from mindspeed_rl.checkpoint.metadata_files import known_arguments, problem_of_metadata
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects

T = TypeVar("T")
_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_NAMED_PROBLEMS = 3
_MOST_THREADS = 8
_BYTES_OF_THREAD = 2**27  # what a thread reads is worth its start


def agree_on_sound(
    directory: str | os.PathLike[str], unsound: dict[str, str], before: int | None = None
) -> tuple[resume.Found, bool]:
    """Return the newest sound checkpoint of a folder, the same on all ranks. Collective: the world.

    Each byte of it is read once, by one of the ranks.

    Args:
        directory: Folder of the run's checkpoints.
        unsound: Names of checkpoints that are not to be taken, with the reasons; those that are
            found damaged are added.
        before: Step that has not been done yet in the checkpoint; ``None``: any may be.

    Returns:
        What was found, and whether it has checksums.

    Raises:
        UsageError: On all ranks: the folder does not exist, or its checkpoints are all damaged.
    """
    while True:
        found, marks = _from_rank_0(lambda: _newest(directory, unsound, before))
        if found.path is None:
            return found, False
        problems = _problems(found.path, marks)
        if not problems:
            return found, any(mark.xxh3 for mark in marks.values())
        unsound[found.path.name] = problems


def agreed_problems(mine: list[str]) -> str:
    """Join what all ranks have found; empty if none has found anything. Collective: the world."""
    found = [text for texts in gather_objects(mine) for text in texts]
    more = f" and {len(found) - _NAMED_PROBLEMS} more" if len(found) > _NAMED_PROBLEMS else ""
    return "; ".join(found[:_NAMED_PROBLEMS]) + more


def _newest(
    directory: str | os.PathLike[str], unsound: Mapping[str, str], before: int | None
) -> tuple[resume.Found, dict[str, FileMark]]:
    found = resume.find_latest(directory, unsound, before)
    if found.path is not None:
        return found, resume.marks_of(found.path)
    if any(map(resume.is_own, resume.checkpoints_of(Path(directory), before))):
        reasons = "".join(f"\n  {line}" for line in found.ignored)
        raise UsageError(
            f"--load {directory}: no checkpoint of this run is sound:{reasons}\n"
            "copy one of them again from where it was kept, or remove them all to start from "
            "--hf-checkpoint"
        )
    return found, {}


def _problems(path: Path, marks: Mapping[str, FileMark]) -> str:
    """Describe what is damaged, first in files, then in metadata. Collective: the world."""
    mine = share_of_files(marks, dist.get_rank(), dist.get_world_size())
    threads = threads_for(sum(marks[name].size_bytes for name in mine))
    if problems := agreed_problems(compare(path, marks, mine, threads)):
        return problems
    found = []
    if dist.get_rank() == 0:
        for folder in (path, *sorted(part for part in path.iterdir() if part.is_dir())):
            if problem := problem_of_metadata(folder):
                found.append(problem if folder == path else f"{folder.name}: {problem}")
    return agreed_problems(found)


def threads_for(num_bytes: int) -> int:
    """Return with how many threads a rank reads files; the ranks of a node share its processors."""
    processors = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, processors, num_bytes // _BYTES_OF_THREAD))


@contextmanager
def plain_objects_only(folder: Path) -> Iterator[None]:
    """Make ``torch.load`` refuse, in this block, to build objects that could run code.

    Libraries ask for more than they need. What this project saves are tensors and plain types; a
    converted checkpoint has the arguments of a run beside them.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with known_arguments(folder):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _from_rank_0(ask: Callable[[], T]) -> T:
    """Return rank 0's answer on all ranks. Collective: the world.

    Raises:
        UsageError: On all ranks, if rank 0's question raises it.
    """
    answer: list[T | UsageError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = ask()
        except UsageError as error:
            answer[0] = error
    dist.broadcast_object_list(answer, 0)
    found = answer[0]
    if isinstance(found, UsageError):
        raise found
    return cast(T, found)
