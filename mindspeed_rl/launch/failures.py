"""Defines failures and their messages, without torch, so that a user's mistake is printed early.

``failure_store.py`` shares failures among ranks, ``watchdog.py`` notices them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_rl.core.ranks import rank_ranges
from mindspeed_rl.launch.attempt import note_end

USAGE_ERROR = 2  # exit code of a user's mistake, as in argparse
START = "start"
"""The phase of a rank that is in no other one, from its begin on."""
JOIN = "join"
"""The phase in which ranks meet; it waits for the slowest node and has its own limit."""

BUILD_ENGINE = "build engine"
LAST_FILES = "last files"
"""The phase in which rank 0 writes summary, curves and page; nothing of the job comes after it."""

# Phases with imports: all ranks may fetch the libraries from a cold network file system at once.
_IMPORTING = (START, JOIN, BUILD_ENGINE)

# usage: the user's mistake; error: an exception; hang: a phase over its deadline; silent: a process
# that does not answer; lost: a process that is gone; stopped: a signal from outside.
Kind = Literal["usage", "error", "hang", "silent", "lost", "stopped"]

# Messages of gloo, HCCL and NCCL on the ranks that survive a peer.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|aborted|refused)|closed by (the )?(remote )?peer|broken pipe"
    r"|socket (is )?closed|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """How long the watchdog of a rank waits, in seconds, and who prints.

    Attributes:
        interval_s: Time between two heartbeats while the phase stays the same.
        poll_interval_s: Longest delay until a new phase is published.
        silence_s: After this long without a heartbeat, or an answer of the store, a machine counts
            as dead. Native code that keeps Python's lock must be faster.
        import_silence_s: The same for a rank in a phase with imports, which keep Python's lock
            while a library of the device comes from its file system.
        cause_timeout_s: How long a rank that merely lost a connection looks for the true cause.
        exit_grace_s: How long the rank that reports a failure stays, so that others read it.
        exit_s: Limit of the exit handlers of libraries.
        connect_s: How long the launcher of the first node may take to answer.
        driver_reports: Whether a driver process prints the failure instead of the ranks.
        saves_at_sigterm: Whether SIGTERM asks for a save and an end after the present step.
    """

    interval_s: float = 1.0
    poll_interval_s: float = 0.2
    silence_s: float = 40.0
    import_silence_s: float = 300.0
    cause_timeout_s: float = 3.5
    exit_grace_s: float = 2.5
    exit_s: float = 60.0
    connect_s: float = 30.0
    driver_reports: bool = False
    saves_at_sigterm: bool = False

    def silence_of(self, phase: str) -> float:
        """Return how long a rank in a phase may be silent."""
        return self.import_silence_s if phase in _IMPORTING else self.silence_s

    @property
    def end_s(self) -> float:
        """Seconds until every rank has read a failure, dumped its stacks (2 s) and left."""
        return self.interval_s + 2 * self.exit_grace_s + 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the job: its global rank, the index of its node, and its pid on that node."""

    rank: int
    node: int
    pid: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why the job ends.

    Attributes:
        kind: Sort of failure; decides the exit code and whether stacks are dumped.
        failed: Process that failed.
        phase: Phase of that process.
        text: Message for the user.
        reporter: Process that noticed the failure and prints it.
        step: Step of that process; ``None`` before the first one.
    """

    kind: Kind
    failed: Member
    phase: str
    text: str
    reporter: Member
    step: int | None = None

    def __str__(self) -> str:
        if self.kind == "usage":
            return f"error: {self.text}"
        return f"the job ends: rank {self.failed.rank} in phase {self.phase}: {self.text}"

    @property
    def with_stacks(self) -> bool:
        """Whether every rank that reads the failure dumps its stacks."""
        return self.kind in ("hang", "silent")

    @property
    def exit_code(self) -> int:
        return USAGE_ERROR if self.kind == "usage" else 1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One heartbeat. ``count`` grows with each one; ``phase_s``: seconds in the phase.

    ``step`` is that of the run; ``None`` before the first one.
    """

    member: Member
    count: int
    phase: str
    phase_s: float
    leaving: bool = False
    step: int | None = None


def silent_ranks(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat]
) -> list[Heartbeat]:
    """Return the last heartbeats of ranks that wrote none in between and are not leaving."""
    return [
        beat
        for rank, beat in sorted(after.items())
        if rank in before and before[rank].count == beat.count and not beat.leaving
    ]


def lost_failure(gone: list[Heartbeat], evidence: str, reporter: Member) -> Failure:
    """Return the failure of ranks whose processes are gone; the first one is named as its cause."""
    member = gone[0].member
    others = ", ".join(f"{beat.member.rank} ({beat.phase})" for beat in gone[1:])
    text = (
        f"process {member.pid} on node {member.node} is gone"
        + (f"; gone as well: ranks {others}" if others else "")
        + f" ({evidence}). Was it killed? See the signal in the launcher's report, and "
        "out-of-memory kills in the kernel's log (dmesg)"
    )
    return Failure("lost", member, gone[0].phase, text, reporter, gone[0].step)


def silent_failure(beat: Heartbeat, seconds: float, reporter: Member) -> Failure:
    """Return the failure of a rank without a heartbeat for ``seconds``."""
    member = beat.member
    text = (
        f"no heartbeat for {seconds:.0f} s: process {member.pid} on node {member.node} is stopped, "
        "or stuck in native code, or its machine is gone"
    )
    return Failure("silent", member, beat.phase, text, reporter, beat.step)


def whereabouts(beats: Iterable[Heartbeat]) -> str:
    """List phases with their durations and ranks; the phase of the fewest ranks is first."""
    phases: dict[str, list[Heartbeat]] = {}
    for beat in beats:
        phases.setdefault(beat.phase, []).append(beat)
    return "; ".join(
        f"{phase} for {max(b.phase_s for b in found):.0f} s: rank "
        f"{rank_ranges(b.member.rank for b in found)}"
        for phase, found in sorted(phases.items(), key=lambda item: len(item[1]))
    )


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception says no more than that a peer closed its connection."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if {"ConnectionError", "DistNetworkError"} & names:  # Python's and torch.distributed's
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_CONNECTION.search(str(error)))


def report_usage_error(line: str) -> None:
    """Print a user's mistake and make torchrun's report repeat it. Local."""
    print(line, file=sys.stderr, flush=True)
    note_end("usage", START, line)
    write_error_file(line)


def write_error_file(text: str) -> None:
    """Make torchrun's closing report show ``text`` instead of a hint how to get a traceback.

    torchrun names a file per process and shows the file of the first process that fails.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name or Path(name).exists():
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(name).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    except OSError as error:  # a full disk is not why the run ends
        print(f"torchrun's report will not repeat it: {error}", file=sys.stderr, flush=True)
