"""Shares heartbeats and the first failure among ranks, in the launcher's store.

The store is a key-value store outside of collectives, so it works while ranks are stuck in one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mindspeed_rl.core.flights import Position
from mindspeed_rl.launch import attempt
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.bound_store import BoundStore, is_of_launcher
from mindspeed_rl.launch.failures import Failure, Heartbeat, Member, WatchdogSettings

T = TypeVar("T")


class FailureStore:
    """The heartbeats of all ranks and the first failure of the job. Safe from several threads.

    No call waits for a key that another rank may never write.

    Args:
        store: Connection that only this object uses.
        member: This process.
    """

    def __init__(self, store: Store, member: Member) -> None:
        self._store = store
        self._member = member
        self._count = 0

    def beat(self, phase: str, phase_s: float, *, leaving: bool = False) -> None:
        """Write a heartbeat; with ``leaving`` the end of this rank is no failure from now on."""
        self._count += 1
        beat = Heartbeat(self._member, self._count, phase, phase_s, leaving, attempt.current_step())
        self._store.set(f"beat/{self._member.rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Iterable[int]) -> dict[int, Heartbeat]:
        """Return the last heartbeats of those ranks that wrote any."""
        found = {}
        for rank in ranks:
            if self._store.check([key := f"beat/{rank}"]):
                fields = json.loads(self._store.get(key))
                found[rank] = Heartbeat(**fields | {"member": Member(**fields["member"])})
        return found

    def ask(self) -> None:
        """Ask all ranks where they stand in collectives; they answer with a heartbeat."""
        self._store.set("asked", "1")

    def is_asked(self) -> bool:
        """Whether some rank asked."""
        return bool(self._store.check(["asked"]))

    def answer(self, position: Position) -> None:
        """Tell where this rank stands in collectives."""
        self._store.set(f"position/{self._member.rank}", json.dumps(asdict(position)))

    def positions(self, ranks: Iterable[int]) -> dict[int, Position]:
        """Return where those ranks stand that answered."""
        found = {}
        for rank in ranks:
            if self._store.check([key := f"position/{rank}"]):
                found[rank] = Position.from_json(json.loads(self._store.get(key)))
        return found

    def tell_attempt(self, mine: attempt.Attempt) -> None:
        """Tell the other nodes which attempt of the job this node is in."""
        self._store.set(f"attempt/{self._member.node}", json.dumps(mine))

    def attempts(self, num_nodes: int) -> list[attempt.Attempt]:
        """Return the attempts of all nodes; none before each has told its own.

        One request, and another one at the end: all ranks of the job ask.
        """
        keys = [f"attempt/{node}" for node in range(num_nodes)]
        if not self._store.check(keys):
            return []
        return [attempt.Attempt(*json.loads(told)) for told in self._store.multi_get(keys)]

    def publish(self, failure: Failure) -> Failure:
        """Publish a failure and return the job's first one, which is kept. Atomic."""
        return _failure(self._store.compare_set("failure", "", json.dumps(asdict(failure))))

    def published(self) -> Failure | None:
        """Return the first failure of the job, if any."""
        return _failure(self._store.get("failure")) if self._store.check(["failure"]) else None


def _failure(text: bytes) -> Failure:
    fields = json.loads(text)
    members = {name: Member(**fields[name]) for name in ("failed", "reporter")}
    return Failure(**fields | members)


def this_member(world: World) -> Member:
    """Return the member that names this process to others."""
    return Member(world.rank, int(os.environ.get("GROUP_RANK", "0")), os.getpid())


def connect(rank: int, timeout_s: float) -> PrefixStore:
    """Open a separate connection to torchrun's store: the default group's may be blocked.

    The store exists before the ranks do, so ranks that never join can publish failures, too. Under
    another launcher rank 0 opens the store here and later shares it with the process group.

    Raises:
        RuntimeError: The launcher of the first node, which holds the store, does not answer, or is
            another one than this node's launcher met.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = BoundStore(
            host, port, is_master=opens, timeout=timedelta(seconds=timeout_s), multi_tenant=True
        )
    except dist.DistError as error:
        raise RuntimeError(
            f"the launcher of the first node does not answer at {host}:{port} for "
            f"{timeout_s:g} s: it has ended, see its output, or MASTER_ADDR is wrong"
        ) from error
    if not is_of_launcher(store):
        raise RuntimeError(
            f"the launcher of the first node was started again since this node met it at "
            f"{host}:{port}; start this node again"
        )
    return shared_part(store)


def shared_part(store: TCPStore) -> PrefixStore:
    """Return the part of the launcher's store for heartbeats and failures of this (re)start."""
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"mindspeed_rl/{run}", store)


def publish_usage_error(world: World, text: str, settings: WatchdogSettings) -> None:
    """Publish a user's mistake that this rank found before it joined the other nodes.

    Returns after they have had the time to read it.
    """
    me = this_member(world)
    failure = Failure("usage", me, "start", text, me)
    try:
        FailureStore(connect(world.rank, settings.connect_s), me).publish(failure)
    except RuntimeError:  # the first node has ended, and the job with it
        return
    time.sleep(settings.exit_grace_s)


def answer_within(seconds: float, ask: Callable[[], T]) -> T:
    """Return the store's answer to a call; such calls have no time limit of their own.

    Raises:
        DistError: The store is gone, or does not answer in time.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise dist.DistStoreError(f"no answer within {seconds:g} s") from None
