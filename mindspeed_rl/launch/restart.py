"""Starts the job of a node again after it failed: ``python -m mindspeed_rl.launch.restart``.

``pretrain_scripts/launch.sh`` puts it in front of torchrun where restarts are allowed. Every node
has one; they need not talk to each other, because a failure of one rank ends the ranks of all
nodes, and the new ranks meet as those of the first start did. Where a job may go on with fewer
nodes, they agree on each attempt first (room `elastic`). It imports no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.owned_folders import SHARED_MEMORY, owned_folder
from mindspeed_rl.elastic.commands import NodeCommand, value_of
from mindspeed_rl.elastic.meeting import JobEnd
from mindspeed_rl.elastic.node import ElasticNode, Start
from mindspeed_rl.launch.attempt import (
    BEGAN,
    END,
    NOTES,
    PEER_FOLDER,
    RESTARTS,
    End,
    read_end,
)
from mindspeed_rl.launch.failures import USAGE_ERROR
from mindspeed_rl.launch.recovery_time import (
    REACHED,
    FailureTimes,
    ProcessWatch,
    reached,
    recovery_line,
)

LONGEST_BACKOFF_S = 300.0
# Added on all nodes but the first, so that they do not meet its old store: its launcher gives a
# rank that is stuck 30 s before it kills it.
OTHER_NODES_S = 35.0
_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
# Kinds of failures that a restart does not mend.
_FINAL = ("usage", "stopped")
# How often a fault of a kind must come at one step to count as repeating. What happens to machines
# may hit a long step twice by accident; what the program does by itself does not.
_REPEATS = {"lost": 3, "silent": 3}


@dataclass(frozen=True, slots=True)
class Rules:
    """How often a job is restarted, how long the first pause is, and what is added to each.

    Both are in seconds.
    """

    max_restarts: int
    backoff_s: float
    later_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a failed attempt: a pause and a restart, or the end with a reason."""

    pause_s: float = 0.0
    stop: str = ""


def decide(rules: Rules, ends: Sequence[End]) -> Decision:
    """Decide what follows the last of the failed attempts ``ends`` of a job."""
    last = ends[-1]
    if last.kind in _FINAL:
        return Decision(stop="a restart would not help")
    alike = _alike(ends)
    if alike >= _REPEATS.get(last.kind, 2):
        where = "before the first step" if last.step is None else f"at step {last.step}"
        return Decision(
            stop=f"the same fault came {alike} times in a row {where} (phase {last.phase}), so "
            "another restart would not help"
        )
    if len(ends) > rules.max_restarts:
        return Decision(stop=f"all restarts are used up (--max-restarts {rules.max_restarts})")
    in_vain = next((i for i, end in enumerate(reversed(ends)) if end.step != last.step), len(ends))
    backoff_s = min(LONGEST_BACKOFF_S, rules.backoff_s * 2 ** (in_vain - 1))
    return Decision(pause_s=backoff_s + rules.later_s)


def _alike(ends: Sequence[End]) -> int:
    """Return how many of the last attempts ended at the same step in the same way."""
    last = ends[-1]
    count = 0
    for end in reversed(ends):
        if (end.step, end.phase, end.kind) != (last.step, last.phase, last.kind):
            break
        count += 1
    return count


def restart_line(rules: Rules, ends: Sequence[End], pause_s: float) -> str:
    """Return the line that tells a restart."""
    last = ends[-1]
    where = "before its first step" if last.step is None else f"in step {last.step}"
    return (
        f"restart {len(ends)} of {rules.max_restarts} in {pause_s:g} s: the job ended {where}: "
        f"{last.text}"
    )


class Supervisor:
    """Runs a command, again and again until it ends well or nothing is left to try.

    Args:
        rules: When to restart.
        command: Command line of the node's launcher.
        asks_ranks: Whether SIGTERM goes to the ranks themselves, which save and end; else to the
            launcher, which ends them.
        elastic: What makes the command of each attempt, where the nodes may change.
    """

    def __init__(
        self,
        rules: Rules,
        command: Sequence[str],
        *,
        asks_ranks: bool,
        elastic: ElasticNode | None = None,
    ) -> None:
        self._rules, self._command, self._asks_ranks = rules, list(command), asks_ranks
        self._elastic = elastic
        self._child: subprocess.Popen[bytes] | None = None
        self._failure: FailureTimes | None = None  # the last one, until the step after it is told
        self._stopped = 0  # the signal that ended it

    def run(self) -> int:
        """Return the exit code of the last attempt."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        with ExitStack() as stack:
            variables = dict[str, str]()
            if keeps_copies(self._command):
                folder = stack.enter_context(owned_folder("peers", SHARED_MEMORY))
                variables[PEER_FOLDER] = folder
            code, text = self._run(variables)
            if self._elastic is not None:
                self._elastic.leave(code, text)
            return code

    def _run(self, variables: dict[str, str]) -> tuple[int, str]:
        """Return the exit code of the last attempt, and how the job ended."""
        ends, code, began = list[End](), 0, time.time()
        while True:
            if self._elastic is None:
                start: Start | JobEnd | None = Start(self._command, len(ends), began)
            else:
                start = self._elastic.next(len(ends), lambda: self._stopped)
            if isinstance(start, JobEnd):
                _say(f"no attempt: {start.text}")
                return start.code or code, start.text
            if start is None:
                return 128 + self._stopped, "stopped by a signal"
            code, end = self._attempt(start, variables)
            if self._stopped:
                return code, "stopped by a signal"
            if code == 0:
                return code, "it is done"
            ends.append(end)
            decision = decide(self._rules, ends)
            if decision.stop:
                _say(f"no restart: {decision.stop}; the last failure: {end.text}")
                return code, decision.stop
            _say(restart_line(self._rules, ends, decision.pause_s))
            self._pause(decision.pause_s)

    def _attempt(self, start: Start, variables: dict[str, str]) -> tuple[int, End]:
        with owned_folder("attempt") as name:
            notes, started = Path(name), time.time()
            own = {RESTARTS: str(start.restarts), BEGAN: str(start.began), NOTES: name}
            self._child = subprocess.Popen(
                start.command, env=os.environ | variables | own, preexec_fn=_end_with_parent
            )
            watch = ProcessWatch(self._child.pid, notes)
            while (code := self._child.poll()) is None:
                watch.wait()
                times = reached(notes)
                if self._failure is not None and len(times) == len(REACHED):
                    _say(recovery_line(start.restarts, self._failure, started, times))
                    self._failure = None
            self._failure = watch.failure(notes / END)
            end = read_end(notes, code)
            return (code if code >= 0 else 128 - code), end  # as a shell tells a signal

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < end:
            time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped = number
        child = self._child
        if child is None or child.returncode is not None or number == signal.SIGINT:
            return  # the terminal sends SIGINT to the launcher as well
        ranks = children_of(child.pid) if self._asks_ranks else []
        for pid in ranks or [child.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def keeps_copies(command: Sequence[str]) -> bool:
    """Whether the ranks of a command line make copies that outlive them."""
    return value_of("--peer-checkpoint-steps", command) not in ("", "0")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(folder.name))
    return found


def _end_with_parent() -> None:
    """Let the kernel end the launcher if the supervisor is killed; in the child, before exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say(text: str) -> None:
    print(f"mindspeed_rl.launch.restart: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code of the job."""
    parser = argparse.ArgumentParser(prog="mindspeed_rl.launch.restart", description=__doc__)
    parser.add_argument("--max-restarts", type=int, required=True)
    parser.add_argument("--restart-backoff-s", type=float, default=10.0)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--elastic-min-nodes", type=int, default=0)
    parser.add_argument("--elastic-wait-s", type=float, default=30.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    elastic = None
    if given.elastic_min_nodes:
        try:
            elastic = ElasticNode(
                NodeCommand.parse(command), given.elastic_min_nodes, given.elastic_wait_s, _say
            )
        except UsageError as error:
            _say(f"error: {error}")
            return USAGE_ERROR
    # Nodes that meet have all ended before the next attempt.
    later_s = OTHER_NODES_S if given.node_rank and elastic is None else 0.0
    rules = Rules(given.max_restarts, given.restart_backoff_s, later_s)
    asks_ranks = "--exit-signal-handler" in [word.replace("_", "-") for word in command]
    return Supervisor(rules, command, asks_ranks=asks_ranks, elastic=elastic).run()


if __name__ == "__main__":
    sys.exit(main())
