"""Copies the state of every rank to host memory after some steps, and takes it back at a restart.

The files lie in a folder of shared memory that belongs to the starter of the node
(``launch/restart.py``), so they outlive the ranks. With several nodes the next node takes a copy of
each file, while the next step runs; a node that is lost is then given its state by its neighbour.
The step before stays whole until all ranks have the new one.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl.checkpoint import resume
from mindspeed_rl.checkpoint.finite import problems_of
from mindspeed_rl.checkpoint.newest_sound import agree_on_sound
from mindspeed_rl.checkpoint.record_tensors import joined, separated
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.attempt import PEER_FOLDER
from mindspeed_rl.launch.job import Job
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.peers.files import (
    CopyId,
    CopyRecord,
    StateFile,
    list_copies,
    problem_of_copy,
    read_copy,
    read_record,
    remove_all_but,
    state_path,
    write_copy,
    write_record,
)
from mindspeed_rl.peers.placement import Nodes, Sources, newest_complete
from mindspeed_rl.peers.state import plain_of, restore, run_digest, tensors_of
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.trainer_state import run_checkpoint
from mindspeed_rl.trainer_state.checkpoint import LoadedState

_EXTRA = "extra"
_CHUNK_BYTES = 2**26
_LONGEST_TRANSFER = timedelta(hours=24)  # a rank that ends, ends the job


class PeerCopies:
    """The copies of a run on this rank. Collective: the world.

    Args:
        job: Job of the run.
        folder: Folder of this node.
    """

    def __init__(self, job: Job[Any, Any], folder: Path) -> None:
        self._job, self._folder = job, folder
        self._interval: int = job.config.checkpoint.peer_checkpoint_steps
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_TRANSFER)
        self._nodes = Nodes.of(gather_objects(str(folder), self._group))
        self._rank = job.world.rank
        self._started: int | None = None  # step of the copy that may still travel
        self._whole: int | None = None  # newest step of which every copy is whole
        self._problem = ""
        self._thread: threading.Thread | None = None

    def is_due(self, step: int) -> bool:
        """Whether a copy is made after ``step``."""
        return step % self._interval == 0

    def take(self, step: int, engines: Mapping[str, TrainEngine], extra: Mapping[str, Any]) -> None:
        """Copy the state after ``step``. Collective: the world.

        A copy that does not fit is told, and the one before stays.

        Args:
            step: Number of steps that are done.
            engines: Models of the run by role, the policy's is empty; all on the device.
            extra: What a checkpoint holds besides the models; rank 0's is kept.

        Raises:
            FloatingPointError: On all ranks: a value is not finite.
        """
        tensors = tensors_of(engines)
        self._settle(step, problems_of(tensors.items()))
        plain = plain_of(engines)
        if self._rank == 0:
            state, kept = separated(extra)
            plain[_EXTRA] = (json.dumps(state), kept)
        run = run_digest(engines, self._rank, self._job.world.size)
        self._started, self._problem = step, ""
        try:
            write_copy(self._folder, CopyId(step, self._rank), run, tensors, plain)
        except OSError as error:
            self._problem = str(error.strerror or error)
        if len(self._nodes.ranks) > 1:
            self._thread = threading.Thread(
                target=self._exchange, args=(step,), name="peer copies", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait until this rank's part of the last copy has reached the next node. Local."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _settle(self, step: int, nonfinite: list[str]) -> None:
        """Learn whether the copy before is whole on all ranks, and drop what is not needed."""
        self.wait()
        told = gather_objects((nonfinite, self._problem), self._group)
        wrong = [f"{text} (rank {r})" for r, (texts, _) in enumerate(told) for text in texts]
        if wrong:
            raise FloatingPointError(
                f"--peer-checkpoint-steps: the state after step {step} has {'; '.join(wrong[:3])}; "
                "lower --lr, or look at the metrics of the last steps"
            )
        lost = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
        if lost:
            self._job.log_rank0(
                f"warning: the copies after step {self._started} are not whole "
                f"({'; '.join(lost[:3])}); those after step {self._whole} stay"
            )
        elif self._started is not None:
            self._whole = self._started
        kept = [] if self._whole is None else [self._whole]
        for rank in (self._rank, *self._nodes.kept_by(self._rank)):
            remove_all_but(self._folder, kept, rank)

    def _exchange(self, step: int) -> None:
        """Give this rank's copy to its keeper and take those of others; in a thread."""
        try:
            mine, keeper = CopyId(step, self._rank), self._nodes.keeper(self._rank)
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(_send, self._folder, mine, keeper, self._group)
                problems = [
                    _receive(self._folder, CopyId(step, rank), rank, self._group)
                    for rank in self._nodes.kept_by(self._rank)
                ]
                problems.append(sent.result())
            self._problem = self._problem or "; ".join(filter(None, problems))
        except Exception as error:  # whatever it was, the copy must not count as whole
            text = f"the transfer to another node ended: {type(error).__name__}: {error}"
            self._problem = self._problem or text

    def load(self, engines: Mapping[str, TrainEngine]) -> LoadedState | None:
        """Take the newest copies, where they are complete and newer than the checkpoint on disk.

        Collective: the world.

        Returns:
            The state that was loaded; ``None``: ``--load`` and ``--save`` decide.
        """
        runs = gather_objects(run_digest(engines, self._rank, self._job.world.size), self._group)
        damaged: set[tuple[int, CopyId]] = set()
        notes: list[str] = []
        while True:
            of_ranks = gather_objects(list_copies(self._folder), self._group)
            of_nodes = [of_ranks[ranks[0]] for ranks in self._nodes.ranks]
            sources = newest_complete(self._nodes, of_nodes, runs, damaged)
            if sources is None or self._disk_is_newer(sources.step):
                self._tell_disk(sources, any(of_nodes), notes)
                self._clear(None)
                return None
            found = gather_objects(self._bring(sources), self._group)
            bad = [
                (sources.node_of_copy[rank], CopyId(sources.step, rank))
                for rank, problem in enumerate(found)
                if problem
            ]
            if not bad:
                break
            damaged.update(bad)
            notes += [f"a copy in memory is not taken: {text}" for text in found if text]
        self._clear(sources.step)
        with self._job.watchdog.phase("load"):
            loaded = self._put_back(sources, engines, notes)
        self._job.log_rank0(*loaded.notes)
        return loaded

    def is_of(self, job: Job[Any, Any]) -> bool:
        """Whether a job is the one that these copies are of."""
        return job is self._job

    def forget(self) -> None:
        """Drop all copies: the run goes back to an earlier checkpoint. Collective: the world."""
        self.wait()
        dist.barrier(self._group)  # nobody writes any more
        self._clear(None)
        self._whole = self._started = None

    def _put_back(
        self, sources: Sources, engines: Mapping[str, TrainEngine], notes: list[str]
    ) -> LoadedState:
        tensors, plain = read_copy(self._folder, CopyId(sources.step, self._rank))
        told = [plain.pop(_EXTRA, None)]
        dist.broadcast_object_list(told, 0, self._group)
        text, kept = told[0]
        restore(engines, tensors, plain)
        away = sum(n != self._nodes.node_of(r) for r, n in enumerate(sources.node_of_copy))
        where = f"; those of {away} ranks came from the next node" if away else ""
        notes.append(f"resuming after step {sources.step} from the copies in memory{where}")
        self._whole = self._started = sources.step
        return LoadedState(sources.step, joined(json.loads(text), kept), tuple(notes))

    def _bring(self, sources: Sources) -> str:
        """Move the copies of ranks whose node has none to it; describe damage of this rank's."""
        problem = ""
        for rank, node in enumerate(sources.node_of_copy):
            if node == self._nodes.node_of(rank):
                continue
            giver, copy = self._nodes.ranks[node][0], CopyId(sources.step, rank)
            if self._rank == giver:
                _send(self._folder, copy, rank, self._group)
            elif self._rank == rank:
                problem = _receive(self._folder, copy, giver, self._group)
        return problem or problem_of_copy(self._folder, CopyId(sources.step, self._rank))

    def _disk_is_newer(self, step: int) -> bool:
        """Whether a sound checkpoint of ``--save`` is newer. Collective: the world."""
        save = self._job.config.checkpoint.save
        newest = None
        if self._rank == 0 and Path(save).is_dir():
            newest = resume.find_latest(save).path
        told = [None if newest is None else resume.step_of(newest)]
        dist.broadcast_object_list(told, 0, self._group)
        if told[0] is None or told[0] <= step:
            return False
        try:
            path = agree_on_sound(save, {})[0].path
        except UsageError:  # none of them is sound
            return False
        return path is not None and resume.step_of(path) > step

    def _tell_disk(self, sources: Sources | None, had_any: bool, notes: list[str]) -> None:
        if sources is not None:
            notes.append(
                f"the copies in memory are of step {sources.step}: the checkpoint on disk is newer"
            )
        elif had_any:
            notes.append(
                "the copies in memory are incomplete, or of another layout: the checkpoint on disk "
                "is taken"
            )
        self._job.log_rank0(*notes)

    def _clear(self, kept: int | None) -> None:
        """Remove all copies but those of a step, on each node, before new ones are made."""
        if self._rank == self._nodes.ranks[self._nodes.node_of(self._rank)][0]:
            remove_all_but(self._folder, [] if kept is None else [kept])
        dist.barrier(self._group)


def open_copies(job: Job[Any, Any]) -> PeerCopies | None:
    """Return the copies of ``--peer-checkpoint-steps``; ``None`` without it. Collective: world."""
    if not job.config.checkpoint.peer_checkpoint_steps:
        return None
    return PeerCopies(job, Path(os.environ[PEER_FOLDER]))


def load(
    peers: PeerCopies | None,
    job: Job[Any, Any],
    engine: TrainEngine,
    companions: Mapping[str, TrainEngine],
    before: int | None,
) -> LoadedState:
    """Load the newest copies, or the checkpoint that the flags of ``job`` name. Collective: world.

    Args:
        peers: Copies of the run; ``None``: it makes none.
        job: That of the run, or one that goes back to an earlier checkpoint; then the copies,
            which are of steps that are given up, are dropped.
        engine: Engine of the policy.
        companions: Other models by role.
        before: Step of a replay, which takes no copies.
    """
    if peers is not None and not peers.is_of(job):
        peers.forget()
    elif (
        peers is not None and before is None and (copied := peers.load({"": engine, **companions}))
    ):
        return copied
    return run_checkpoint.load(job, engine, companions, before)


def _send(folder: Path, copy: CopyId, to: int, group: dist.ProcessGroup) -> str:
    """Send a copy, or that there is none, to a rank; describe what went wrong. Local to both.

    The receiver gets as many bytes as were announced, even where some cannot be read.
    """
    try:
        text = read_record(folder, copy).to_text().encode()
        size = state_path(folder, copy).stat().st_size
        content = state_path(folder, copy).open("rb")
    except (OSError, ValueError, KeyError, TypeError):
        dist.send(torch.zeros(1, dtype=torch.int64), to, group)
        return ""  # the receiver tells it
    problem, left = "", size
    with content:
        dist.send(torch.tensor([len(text)]), to, group)
        dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, group)
        dist.send(torch.tensor([size]), to, group)
        while left:
            wanted = min(left, _CHUNK_BYTES)
            try:
                data = b"" if problem else content.read(wanted)
            except OSError as error:
                data, problem = b"", f"{copy.name} cannot be read: {error.strerror or error}"
            if len(data) < wanted and not problem:
                problem = f"{copy.name} was cut while it was sent"
            data = data.ljust(wanted, b"\0")
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to, group)
            left -= wanted
    return problem


def _receive(folder: Path, copy: CopyId, giver: int, group: dist.ProcessGroup) -> str:
    """Write the copy that :func:`_send` gives; describe what went wrong. Local to both.

    All bytes that the giver sends are taken, even where they cannot be kept.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, giver, group)
    if not length.item():
        return f"rank {giver} has no copy of {copy.name}"
    text = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(text, giver, group)
    dist.recv(length, giver, group)
    size, left = int(length), int(length)
    target, problem = None, ""
    try:
        record = CopyRecord.from_text(bytes(text.tolist()).decode())
        target = StateFile(folder, copy, size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{copy.name}: {getattr(error, 'strerror', None) or error}"
    while left:
        chunk = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
        dist.recv(chunk, giver, group)
        left -= chunk.numel()
        if target is not None:
            target.write(chunk.numpy().data)
    if target is None:
        return problem
    try:
        with target:
            mark = target.mark()
            if mark.xxh3 != record.xxh3:
                raise OSError(0, f"{copy.name} changed on its way")
        write_record(folder, record)
    except OSError as error:
        return str(error.strerror or error)
    return ""
