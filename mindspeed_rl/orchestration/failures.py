"""What the ranks of a job tell each other outside of collectives: heartbeats and the first failure.

All of it lives in the driver's key-value store, so it works while ranks are stuck in a collective.
"""

from __future__ import annotations

import dis
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

# usage: the user's mistake; error: an exception; hang: a phase over its deadline; silent: a process
# that does not answer; lost: a process that is gone; stopped: a signal from outside.
Kind = Literal["usage", "error", "hang", "silent", "lost", "stopped"]

# What gloo, HCCL and NCCL say on the ranks that survive a peer.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)|closed by (the )?(remote )?peer|broken pipe"
    r"|socket (is )?closed|remote process exited",
    re.IGNORECASE,
)

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the job.

    Attributes:
        rank: global rank.
        node: index of its node.
        pid: process id on that node.
    """

    rank: int
    node: int
    pid: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the job ends.

    Attributes:
        kind: what sort of failure; decides the exit code and whether stacks are dumped.
        blamed: the process whose fault it is, and the phase that it was in.
        teller: the process that noticed and prints it.
        text: for the user.
        trace: where the exception was raised, for a driver that tells it.
    """

    kind: Kind
    blamed: Member
    phase: str
    text: str
    teller: Member
    trace: str = ""

    def __str__(self) -> str:
        if self.kind == "usage":
            return f"error: {self.text}"
        return f"the job ends: rank {self.blamed.rank} in phase {self.phase}: {self.text}"

    @property
    def with_stacks(self) -> bool:
        """Whether every rank that reads of it dumps its stacks."""
        return self.kind in ("hang", "silent")

    @property
    def exit_code(self) -> int:
        """2 for a mistake of the user, as argparse does."""
        return 2 if self.kind == "usage" else 1


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life. ``count`` grows with every beat; ``phase_s``: seconds in the phase."""

    member: Member
    count: int
    phase: str
    phase_s: float
    leaving: bool


class FailureBoard:
    """The heartbeats of all ranks and the first failure, in a store. Safe from several threads.

    No call waits for a key that another rank may never write.

    Args:
        store: a connection of this object's own.
        member: this process.
        world: number of ranks.
    """

    def __init__(self, store: Store, member: Member, world: int) -> None:
        self._store = store
        self._member = member
        self._world = world
        self._count = 0

    def beat(self, phase: str, phase_s: float, *, leaving: bool = False) -> None:
        """Write a sign of life; ``leaving``: the end of this rank is no failure from now on."""
        self._count += 1
        beat = Beat(self._member, self._count, phase, phase_s, leaving)
        self._store.set(f"beat/{self._member.rank}", json.dumps(asdict(beat)))

    def beat_of(self, rank: int) -> Beat | None:
        """The last sign of life of a rank, if it gave any."""
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return None
        fields = json.loads(self._store.get(key))
        return Beat(**fields | {"member": Member(**fields["member"])})

    def beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """The last signs of life of those ranks that gave any."""
        found = ((rank, self.beat_of(rank)) for rank in ranks)
        return {rank: beat for rank, beat in found if beat is not None}

    def tell(self, failure: Failure) -> Failure:
        """Publish a failure; the first one of the job stands and is returned. Atomic."""
        return _failure(self._store.compare_set("failure", "", json.dumps(asdict(failure))))

    def told(self) -> Failure | None:
        """The failure that stands, if any."""
        if not self._store.check(["failure"]):
            return None
        return _failure(self._store.get("failure"))


def _failure(text: bytes) -> Failure:
    fields = json.loads(text)
    return Failure(**fields | {name: Member(**fields[name]) for name in ("blamed", "teller")})


def silent_ranks(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> list[Beat]:
    """The last beats of ranks that gave no sign of life in between and did not say goodbye."""
    return [
        beat
        for rank, beat in sorted(after.items())
        if rank in before and before[rank].count == beat.count and not beat.leaving
    ]


def lost_failure(gone: list[Beat], evidence: str, teller: Member) -> Failure:
    """The failure of ranks that are gone; the first of them gets the blame."""
    member = gone[0].member
    others = ", ".join(f"{beat.member.rank} ({beat.phase})" for beat in gone[1:])
    text = (
        f"process {member.pid} on node {member.node} is gone"
        + (f"; gone as well: ranks {others}" if others else "")
        + f" ({evidence}). Was it killed? See the signal in torchrun's report, and out-of-memory "
        "kills in the kernel's log (dmesg)"
    )
    return Failure("lost", member, gone[0].phase, text, teller)


def silent_failure(beat: Beat, seconds: float, teller: Member) -> Failure:
    """The failure of a rank without a heartbeat for ``seconds``."""
    member = beat.member
    text = (
        f"no heartbeat for {seconds:.0f} s: process {member.pid} on node {member.node} is stopped, "
        "or stuck in native code, or its machine is gone"
    )
    return Failure("silent", member, beat.phase, text, teller)


def whereabouts(beats: Iterable[Beat]) -> str:
    """Which ranks are in which phase and for how long: who is late is the odd one out."""
    phases: dict[str, list[Beat]] = {}
    for beat in beats:
        phases.setdefault(beat.phase, []).append(beat)
    return "; ".join(
        f"{phase} for {max(b.phase_s for b in found):.0f} s: rank {rank_ranges(found)}"
        for phase, found in sorted(phases.items(), key=lambda item: len(item[1]))
    )


def rank_ranges(beats: Iterable[Beat]) -> str:
    """Ranks in short: ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(beat.member.rank for beat in beats):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception says no more than that a peer went away."""
    if isinstance(error, (ConnectionError, dist.DistNetworkError)):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_CONNECTION.search(str(error)))


def is_usage_error(error: BaseException) -> bool:
    """Whether an exception is the user's mistake, told without a traceback.

    That is a ``ValueError`` of a raise statement of this package. One that a library or a built-in
    function raises is a bug until proven otherwise, and its traceback is needed.
    """
    trace = error.__traceback__
    if not isinstance(error, ValueError) or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    ours = Path(code.co_filename).is_relative_to(_PACKAGE)
    return ours and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def write_error_file(text: str) -> None:
    """Let torchrun's closing report show ``text`` instead of a hint how to get a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not Path(path).exists():
        stamp = str(int(time.time()))
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}
        Path(path).write_text(json.dumps({"message": message}))
