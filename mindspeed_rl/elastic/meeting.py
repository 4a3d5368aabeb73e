"""Where the starters of a job's nodes agree on who takes part in its next attempt.

They meet in a folder that all of them see, so that any node may be lost, the first one too, and one
that comes back needs nobody's address. Every starter writes a note about itself once a second;
clocks are not compared, only whether a note still changes. Attempts are numbered rounds: who takes
part in a round is a file that is made once, by whoever is first, and holds for all.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

BEAT_S = 1.0
HERE_S = 6.0  # a node whose note changed this lately is there
GONE_S = 30.0  # one whose note did not change for this long is lost; between the two it is unknown
JOIN_LIMIT_S = 900.0  # how long a first start waits for all nodes, and a restart for the fewest
WAITS, RUNS, ENDED = "waits", "runs", "ended"
_ROUND = "round-"


@dataclass(frozen=True, slots=True)
class NodeNote:
    """What a starter says about itself.

    Attributes:
        node: Rank of its node in the whole job.
        starter: Random name of the process.
        address: Where other nodes reach the node.
        round: Round that it waits for or runs in; of one that has ended: that it does not join.
        state: ``waits``, ``runs`` or ``ended``.
        restarts: How often the job was started before.
        began: Time of the first start, in seconds of the epoch.
        beat: Grows with every writing.
        code: Exit code of the job, of one that has ended.
        text: Why it has ended.
    """

    node: int
    starter: str
    address: str
    round: int
    state: str
    restarts: int
    began: float
    beat: int = 0
    code: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class AttemptRound:
    """Who takes part in an attempt; nobody where it is refused.

    Attributes:
        nodes: Ranks of the nodes in the whole job, in the order of their ranks in the attempt.
        starters: Their starters.
        addresses: Their addresses.
        restarts: How often the job was started before.
        began: Time of the first start, in seconds of the epoch.
        refusal: Why the attempt is not made.
    """

    nodes: tuple[int, ...]
    starters: tuple[str, ...]
    addresses: tuple[str, ...]
    restarts: int
    began: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job has ended on another node, or may not go on."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class JobSize:
    """How many nodes a job has, how few it may have, and how long it waits for lost ones, in s."""

    nodes: int
    fewest: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A note of another starter, and how many seconds ago it last changed.

    ``changed`` is whether it has changed at all since it was first seen.
    """

    note: NodeNote
    age_s: float
    changed: bool

    @property
    def is_here(self) -> bool:
        """Whether its starter surely lives."""
        return self.changed and self.age_s < HERE_S

    @property
    def may_live(self) -> bool:
        """Whether its starter is not known to be gone."""
        return self.age_s < GONE_S


def waiting_for(number: int, others: Collection[Seen]) -> tuple[list[NodeNote], bool]:
    """Return the notes of nodes that surely wait for a round, and whether others that did are lost.

    A shared disk that stands still for some seconds silences nodes that live. A round that is
    decided meanwhile would leave them out, so one of unknown state is waited for until it writes
    again or is lost.
    """
    waiting = [s for s in others if s.note.state == WAITS and s.note.round == number]
    here = [seen.note for seen in waiting if seen.is_here]
    return here, all(seen.is_here or not seen.may_live for seen in waiting)


def may_start(size: JobSize, present: Collection[NodeNote], waited_s: float) -> bool:
    """Whether a round is decided with the nodes that are there.

    Args:
        size: Size of the job.
        present: Notes of the nodes that wait for the round.
        waited_s: Seconds since the last moment at which a member of the round before was to come.
    """
    if len(present) >= size.nodes:
        return True
    again = any(note.restarts for note in present)
    enough = len(present) >= size.fewest
    return waited_s >= (size.wait_s if again and enough else JOIN_LIMIT_S)


def chosen_round(
    size: JobSize, present: Collection[NodeNote], problem_of: Callable[[int], str], folder: Path
) -> AttemptRound:
    """Return the round of as many of the nodes that are there as the layout allows.

    Args:
        size: Size of the job.
        present: Notes of the nodes that wait for the round.
        problem_of: Says why the job cannot run on a number of nodes; empty: it can.
        folder: Folder of the meeting, for the message.
    """
    notes = sorted(present, key=lambda note: note.node)
    restarts = max(note.restarts for note in notes)
    began = min(note.began for note in notes)
    refusal = ""
    for count in range(len(notes), size.fewest - 1, -1):
        problem = problem_of(count)
        if not problem:
            part = notes[:count]
            return AttemptRound(
                tuple(note.node for note in part),
                tuple(note.starter for note in part),
                tuple(note.address for note in part),
                *(restarts, began),
            )
        refusal = refusal or problem
    if not refusal:
        lacking = sorted(set(range(size.nodes)) - {note.node for note in notes})
        refusal = (
            f"{len(notes)} of at least {size.fewest} nodes are here after {JOIN_LIMIT_S:g} s, node "
            f"{', '.join(map(str, lacking))} is missing; does every node see {folder}?"
        )
    return AttemptRound((), (), (), restarts, began, refusal)


class Meeting:
    """One starter's part in the meetings of a job.

    Args:
        folder: A folder that all nodes see; it is made.
        size: Size of the job.
        node: Rank of this node in the whole job.
        address: Where other nodes reach this one.
        say: Prints a line.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self, folder: Path, size: JobSize, node: int, address: str, say: Callable[[str], None]
    ) -> None:
        self._folder, self._size, self._say = folder, size, say
        self._mine = NodeNote(node, secrets.token_hex(8), address, 0, WAITS, 0, time.time())
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[NodeNote, float, bool]] = {}
        self._fellows: frozenset[str] = frozenset()  # starters of the round before
        self._closed = threading.Event()
        self._warned = False
        folder.mkdir(parents=True, exist_ok=True)
        self._write()
        probe = folder / f".link-{self._mine.starter}"
        os.link(folder / f"node-{node}.json", probe)  # rounds are decided by a link
        probe.unlink()
        self._pulse = threading.Thread(target=self._beat, name="meeting", daemon=True)
        self._pulse.start()

    def join(
        self, restarts: int, problem_of: Callable[[int], str], stopped: Callable[[], object]
    ) -> AttemptRound | JobEnd | None:
        """Wait for the round of the next attempt and return it; ``None``: stopped meanwhile.

        Args:
            restarts: How often this starter has started its ranks before.
            problem_of: Says why the job cannot run on a number of nodes; empty: it can.
            stopped: Whether to wait no longer.
        """
        self._seen.clear()  # what a note said at the last meeting is no sign of life
        if restarts == 0:
            self._wait_for_next(restarts)
        else:
            self._tell(state=WAITS, round=self._mine.round + 1, restarts=restarts)
        last_blocked = None
        while not stopped():
            now, number = time.monotonic(), self._mine.round
            decided = read_round(self._folder, number)
            if decided is not None and (decided.refusal or self._is_in(decided)):
                return self._entered(decided)
            if decided is not None:
                self._say("the job goes on without this node, which waits for its next restart")
                self._wait_for_next(restarts)
                continue
            others = self._look(now)
            if end := self._end_of(others, number):
                return end
            if last_blocked is None or self._blocked(others, number):
                last_blocked = now
            waiting, all_known = waiting_for(number, others)
            present = [self._mine, *waiting]
            leads = self._mine.node == min(note.node for note in present)
            if leads and all_known and may_start(self._size, present, now - last_blocked):
                chosen = chosen_round(self._size, present, problem_of, self._folder)
                self._try(partial(write_round, self._folder, number, chosen))
            else:
                time.sleep(BEAT_S / 2)
        return None

    def leave(self, code: int, text: str) -> None:
        """Tell the other nodes that this one is in no further round, and why."""
        self._closed.set()
        self._pulse.join()
        after = self._mine.round + (self._mine.state == RUNS)
        self._tell(state=ENDED, round=after, code=code, text=text)

    def _is_in(self, decided: AttemptRound) -> bool:
        return self._mine.starter in decided.starters

    def _entered(self, decided: AttemptRound) -> AttemptRound | JobEnd:
        if decided.refusal:
            return JobEnd(1, decided.refusal)
        self._fellows = frozenset(decided.starters)
        self._tell(state=RUNS)
        return decided

    def _wait_for_next(self, restarts: int) -> None:
        """Wait for the round behind the last one that was decided, as one who is not in that."""
        number, before = newest_round(self._folder), None
        while (later := read_round(self._folder, number)) is not None:
            number, before = number + 1, later
        self._fellows = frozenset(before.starters if before else ())
        self._tell(state=WAITS, round=number, restarts=restarts)

    def _look(self, now: float) -> list[Seen]:
        """Read the notes of the other nodes."""
        found = []
        for node in range(self._size.nodes):
            if node == self._mine.node:
                continue
            note = read_note(self._folder, node)
            if note is None:
                continue
            before, at, changed = self._seen.get(node, (None, now, False))
            if before is None or before.starter != note.starter:
                at, changed = now, False
            elif before.beat != note.beat:
                at, changed = now, True
            self._seen[node] = (note, at, changed)
            found.append(Seen(note, now - at, changed))
        return found

    def _blocked(self, others: Collection[Seen], number: int) -> bool:
        """Whether a member of the round before still runs, and is to come."""
        return any(
            seen.may_live and seen.note.state == RUNS and seen.note.round == number - 1
            for seen in others
            if seen.note.starter in self._fellows
        )

    def _end_of(self, others: Collection[Seen], number: int) -> JobEnd | None:
        """Return the end of the job that a member of the round before has told.

        A first start finds the notes of the job before, which were never seen to change.
        """
        for seen in others:
            note = seen.note
            fellow = note.starter in self._fellows and (seen.changed or self._mine.restarts)
            if fellow and note.state == ENDED and note.round == number:
                return JobEnd(note.code, f"node {note.node} ended the job: {note.text}")
        return None

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._try(self._write)

    def _tell(self, **changes: object) -> None:
        with self._lock:
            self._mine = replace(self._mine, **changes)  # type: ignore[arg-type]
        self._try(self._write)

    def _try(self, write: Callable[[], None]) -> None:
        """Write; what a full disk or a server that is away prevents, a later beat makes good."""
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._say(f"warning: {self._folder} cannot be written: {error.strerror}")
            self._warned = True
            time.sleep(BEAT_S)

    def _write(self) -> None:
        with self._lock:
            self._mine = replace(self._mine, beat=self._mine.beat + 1)
            target = self._folder / f"node-{self._mine.node}.json"
            hidden = target.with_name(f".{target.name}-{self._mine.starter}")
            hidden.write_text(json.dumps(asdict(self._mine)))
            hidden.rename(target)


def read_note(folder: Path, node: int) -> NodeNote | None:
    """Return the note of a node; ``None``: there is none that can be read."""
    try:
        note = NodeNote(**json.loads((folder / f"node-{node}.json").read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = (int, str, str, int, str, int, float, int, int, str)
    return note if tuple(map(type, asdict(note).values())) == kinds else None


def read_round(folder: Path, number: int) -> AttemptRound | None:
    """Return a round that was decided; ``None``: it was not.

    Raises:
        ValueError: The file is not one of a round.
    """
    path = folder / f"{_ROUND}{number}.json"
    try:
        values = json.loads(path.read_bytes())
        lists = {name: tuple(values[name]) for name in ("nodes", "starters", "addresses")}
        return AttemptRound(**(values | lists))
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is not a round of a meeting; remove {folder}") from None


def newest_round(folder: Path) -> int:
    """Return the number of the last round that was decided; 0 where there was none."""
    numbers = [path.stem.removeprefix(_ROUND) for path in folder.glob(f"{_ROUND}*.json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def write_round(folder: Path, number: int, decided: AttemptRound) -> None:
    """Decide a round, unless it was decided already. Atomic, over NFS too.

    Raises:
        OSError: The folder cannot be written.
    """
    target = folder / f"{_ROUND}{number}.json"
    hidden = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
    try:
        hidden.write_text(json.dumps(asdict(decided)))
        os.link(hidden, target)
    except FileExistsError:
        return
    finally:
        hidden.unlink(missing_ok=True)
