"""Notices that a rank failed, died or hangs, and ends all ranks with the cause (R30).

Every rank runs one thread. It writes a heartbeat into torchrun's store, looks for a published
failure, and checks its own phase against its deadline. The first rank of each node also looks at
the heartbeats of all ranks. Nothing here is collective, so it works while peers are stuck in one.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

INTERVAL_S = 1.0
# A rank whose thread is silent for this long is dead or its machine is.
SILENCE_S = 30.0
# How long a rank that ends waits for its peers to read the cause.
LINGER_S = 3.0


class Watchdog:
    """The watcher of one rank.

    Args:
        rank: global rank.
        world: number of ranks.
        phase_timeout_s: default deadline of a phase, in seconds.
    """

    def __init__(self, rank: int, world: int, phase_timeout_s: float) -> None:
        self._rank = rank
        self._world = world
        self._timeout_s = phase_timeout_s
        self._phase = "start"
        self._phase_start = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._store = self._connect()
        self._seen: dict[int, tuple[bytes, float]] = {}

    @staticmethod
    def _connect() -> Store:
        """A connection of our own: the default group's may be blocked in another thread."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        return PrefixStore(f"mindspeed_rl/{run}", store)

    def start(self) -> None:
        """Begin to watch."""
        faulthandler.enable()
        self._thread.start()

    def stop(self) -> None:
        """A peer that ends from now on is no failure."""
        self._ended.set()
        self._store.set(f"done/{self._rank}", "1")
        self._thread.join(timeout=5 * INTERVAL_S)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what this rank is doing; its deadline starts anew. Nested phases restore."""
        before = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, name: str) -> None:
        self._phase, self._phase_start = name, time.monotonic()

    def publish(self, cause: str) -> bool:
        """Tell all ranks why this one ends; true when nobody had told a cause before."""
        try:
            first = int(self._store.add("failures", 1)) == 1
            if first:
                self._store.set("failure", f"rank {self._rank} in phase {self._phase}: {cause}")
            return first
        except dist.DistError:
            return True

    def tell_cause(self) -> None:
        """Print the published cause."""
        try:
            cause = self._store.get("failure").decode()
        except dist.DistError as error:
            cause = f"the rendezvous store is gone ({error})"
        print(f"rank {self._rank} ends: {cause}", file=sys.stderr, flush=True)

    def linger(self) -> None:
        """Stay long enough for peers to read the cause from the store."""
        self._ended.set()
        time.sleep(LINGER_S)

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            try:
                self._store.set(f"beat/{self._rank}", f"{time.time()} {self._phase}")
                if self._store.check(["failure"]):
                    self._end(self._store.get("failure").decode())
                if self._rank == int(os.environ.get("GROUP_RANK", "0")) or self._is_first_local():
                    self._look_at_peers()
            except dist.DistError as error:
                if not self._ended.is_set():
                    self._end(f"the rendezvous store is gone: {error}")
            elapsed = time.monotonic() - self._phase_start
            if elapsed > self._timeout_s:
                cause = f"exceeded --phase-timeout-s {self._timeout_s:g} ({elapsed:.0f} s)"
                self.publish(cause)
                self._end(f"rank {self._rank} in phase {self._phase}: {cause}")

    def _is_first_local(self) -> bool:
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def _look_at_peers(self) -> None:
        now = time.monotonic()
        for peer in range(self._world):
            key = f"beat/{peer}"
            if peer == self._rank or not self._store.check([key]):
                continue
            beat = self._store.get(key)
            known = self._seen.get(peer)
            if known is None or known[0] != beat:
                self._seen[peer] = (beat, now)
            elif now - known[1] > SILENCE_S and not self._store.check([f"done/{peer}"]):
                phase = beat.decode().partition(" ")[2]
                cause = f"rank {peer} is silent for {SILENCE_S:g} s; its last phase was {phase}"
                self.publish(cause)
                self._end(cause)

    def _end(self, cause: str) -> None:
        """Dump all stacks of this process and leave: the main thread may be stuck in C++."""
        print(f"rank {self._rank} (phase {self._phase}) ends: {cause}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        time.sleep(LINGER_S)
        os._exit(1)
