"""Writes a checkpoint from what all ranks have planned, and makes it valid."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.checksums import FileMark
from mindspeed_rl.checkpoint.finite import problems_of
from mindspeed_rl.checkpoint.full_disk import space_line
from mindspeed_rl.checkpoint.record_tensors import write_tensors
from mindspeed_rl.checkpoint.resume import CheckpointRecord
from mindspeed_rl.checkpoint.staging import Host, StagingMemory
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written: entries of the index, and marks of files by their names."""

    results: list[Any]
    marks: dict[str, FileMark]


class Part(Protocol):
    """The part of a folder of tensors that a rank writes."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank writes, each with its name and offset in the model."""

    def stage(self, copies: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]) -> None:
        """Put copies in the place of what is to be written, unless it is a copy already. Local."""

    def write(self) -> Written:
        """Write this rank's files and flush them to disk. Local; raises ``OSError``."""

    def finish(self, results: list[list[Any]]) -> None:
        """Write the index, on rank 0, from the results of all ranks. Local."""


@dataclass(frozen=True, slots=True)
class UnwrittenCheckpoint:
    """A checkpoint of which every rank knows its part, and nothing is valid yet.

    Attributes:
        directory: Folder of the run's checkpoints.
        record: What the checkpoint holds.
        parts: This rank's part of each model, by role; the policy's is empty.
        host: The platform.
        needed: Bytes of the whole checkpoint, about.
        tensors: Tensors that the record names, on the host; rank 0's are kept.
    """

    directory: str | os.PathLike[str]
    record: CheckpointRecord
    parts: Mapping[str, Part]
    host: Host
    needed: int
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def stage(self, memory: StagingMemory) -> None:
        """Copy this rank's part, so that the models may change before :meth:`write`. Local.

        Args:
            memory: Holds the copies until the next checkpoint is staged in it.
        """
        for role, part in self.parts.items():
            part.stage(partial(memory.copies, self.host, role))
        self.host.synchronize()

    def check_values(self, group: dist.ProcessGroup | None = None) -> None:
        """Refuse to keep values that cannot be. Collective: the world.

        Args:
            group: A group of all ranks; ``None``: the default one.

        Raises:
            FloatingPointError: On all ranks; the message names tensor and rank.
        """
        mine = [
            f"{role + ': ' if role else ''}{problem} (rank {dist.get_rank()})"
            for role, part in self.parts.items()
            for problem in problems_of(part.tensors())
        ]
        found = [problem for problems in gather_objects(mine, group) for problem in problems]
        if found:
            if dist.get_rank() == 0:
                shutil.rmtree(resume.partial_path(self.directory, self.record.step))
            raise FloatingPointError(
                f"--save {self.directory}: step {self.record.step} is not saved, its state has "
                f"{'; '.join(found[:3])}; earlier checkpoints are untouched. Lower --lr, or look "
                "at the metrics of the last steps"
            )

    def write(self, group: dist.ProcessGroup | None = None) -> Path:
        """Write this rank's files; when all ranks have, make the checkpoint valid.

        Collective: the world.

        Args:
            group: A group of all ranks; ``None``: the default one.

        Returns:
            The folder of the new checkpoint.

        Raises:
            OSError: On all ranks, with the error of the first one that could not write.
            UsageError: On all ranks: a complete checkpoint of this step exists.
        """
        problem, written = "", {}
        try:
            written = {role: part.write() for role, part in self.parts.items()}
        except OSError as error:
            problem = f"rank {dist.get_rank()}: {error}"
        of_ranks: list[tuple[str, dict[str, Written]] | None] = [None] * dist.get_world_size()
        on_rank_0 = of_ranks if dist.get_rank() == 0 else None
        dist.gather_object((problem, written), on_rank_0, 0, group)
        answer: list[Exception | None] = [None]
        if on_rank_0:
            answer = [self._commit([found for found in on_rank_0 if found])]
        dist.broadcast_object_list(answer, 0, group)
        if answer[0] is not None:
            raise answer[0]
        return resume.checkpoint_path(self.directory, self.record.step)

    def _commit(self, of_ranks: list[tuple[str, dict[str, Written]]]) -> Exception | None:
        """Make the checkpoint valid, or remove what there is of it; return what went wrong."""
        folder = resume.partial_path(self.directory, self.record.step)
        problem = next((text for text, _ in of_ranks if text), "")
        try:
            if not problem:
                marks: dict[str, FileMark] = {}
                for role, part in self.parts.items():
                    part.finish([written[role].results for _, written in of_ranks])
                    for _, written in of_ranks:
                        names = written[role].marks.items()
                        marks |= {str(Path(role) / name): mark for name, mark in names}
                write_tensors(folder, self.tensors)
                resume.commit(self.directory, self.record, marks)
        except UsageError as error:
            return error
        except OSError as error:
            problem = f"rank 0: {error}"
        if not problem:
            return None
        space = space_line(self.directory, self.record.step, self.needed)
        shutil.rmtree(folder, ignore_errors=True)
        return OSError(
            f"--save {self.directory}: the checkpoint after step {self.record.step} is not "
            f"written: {problem} ({space}); earlier checkpoints are untouched"
        )


def check_shared(partial: Path) -> None:
    """Check that every rank sees the folder that rank 0 made. Collective: the world."""
    seen = gather_objects(partial.is_dir())
    if not all(seen):
        raise OSError(
            f"--save {partial.parent}: rank {seen.index(False)} does not see {partial.name}, which "
            "rank 0 made; name a folder on a file system that all nodes share"
        )
