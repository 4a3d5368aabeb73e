"""A pool of reward workers with a hard limit on every sample.

One thread, the caller's: `RewardPool.score` hands out chunks, collects results and kills what runs
too long. Workers answer sample by sample, so the clock of a worker restarts at each answer. A
caller that has its samples one by one, with other work in between, uses `RewardPool.scoring`.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
import weakref
from collections.abc import Sequence

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.rewards.batch import Batch
from mindspeed_rl.rewards.pool_base import MAX_CHUNK, MAX_LOGGED_CHARS, PoolBase, PoolOptions
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardError
from mindspeed_rl.rewards.wire import Kind
from mindspeed_rl.rewards.worker_process import WorkerProcess, WorkerSetup

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # user files may import torch from a cold network file system
EXIT_GRACE_S = 1.0


class RewardPool(PoolBase):
    """Scores samples in worker processes; see `score`.

    The constructor returns when all workers are ready, so a wrong reward name fails at once. Use as
    a context manager or call `close`. Thread-safe; calls run one after the other. Create it in a
    thread that lives as long as the pool: on Linux workers die with the thread that started them.

    Args:
        specs: the reward functions: `RewardSpec` or its command line syntax.
        num_workers: processes, at least 1.
        timeout_s: wall-clock limit of one sample over all its functions.
        batch_timeout_s: wall-clock limit of one `score` call.
        timeout_score: reward of a sample that ran out of time; ``None`` leaves it out.
        memory_limit_bytes: memory (address space) a worker may use on top of its imports; ``None``
            for no limit.
        max_error_rate: share of failed samples above which `score` raises, over one call or as many
            small ones in a row as it takes for a single failure to be within it.
        settings: of the built-in rewards.

    Raises:
        ValueError: an argument out of range; an unknown or unusable reward function.
        RewardError: a worker does not start.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec | str],
        *,
        num_workers: int = 4,
        timeout_s: float = 10.0,
        batch_timeout_s: float = 300.0,
        timeout_score: float | None = 0.0,
        memory_limit_bytes: int | None = 4 << 30,
        max_error_rate: float = 0.05,
        settings: RewardSettings | None = None,
    ) -> None:
        parsed = tuple(RewardSpec.parse(spec) if isinstance(spec, str) else spec for spec in specs)
        super().__init__(
            PoolOptions(
                parsed,
                num_workers,
                timeout_s,
                batch_timeout_s,
                timeout_score,
                memory_limit_bytes,
                max_error_rate,
                settings or RewardSettings(),
            )
        )
        self._setup = WorkerSetup(parsed, memory_limit_bytes, self.options.settings)
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        # Runs at close(), at garbage collection or at exit, whichever is first; once.
        self._finalizer = weakref.finalize(
            self, _kill_all, self._workers, self._selector, os.getpid()
        )
        try:
            for _ in range(num_workers):
                self._workers.append(self._start_worker())
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        self._finalizer()

    @property
    def is_open(self) -> bool:
        """Whether it can still score."""
        return self._finalizer.alive

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the current workers, for diagnosis."""
        return tuple(worker.process.pid for worker in self._workers)

    def turn(self, batch: Batch, until_s: float) -> float:
        """Hand out, then wait for the next answer or limit, but not longer than ``until_s``.

        Returns:
            When it began to wait: all answers sent before have been read.
        """
        self._hand_out(batch)
        now_s = time.monotonic()
        deadlines_s = [w.deadline_s for w in self._workers if w.pending or not w.ready]
        self._pump(batch, max(0.0, min([until_s, *deadlines_s]) - now_s))
        # However late this process was scheduled, nobody is killed for an answer not yet read.
        for worker in list(self._workers):
            if worker.deadline_s <= now_s and (worker.pending or not worker.ready):
                self._overdue(worker, batch)
        self._hand_out(batch)
        return now_s

    def _hand_out(self, batch: Batch) -> None:
        """Give each worker that has room a share of what waits: large first, then single ones."""
        for worker in self._workers:
            if not batch.waiting:
                return
            if worker.room:
                share = min(len(batch.waiting) // (2 * len(self._workers)), MAX_CHUNK)
                positions = batch.take(max(worker.room, share))
                if not worker.pending:
                    worker.deadline_s = time.monotonic() + self.options.timeout_s
                worker.send_requests(positions, [batch.requests[i] for i in positions])
                self._watch(worker)

    def _pump(self, batch: Batch, wait_s: float) -> None:
        """Wait for the sockets for at most ``wait_s``, then move what can be moved."""
        for key, events in self._selector.select(wait_s):
            worker: WorkerProcess = key.data
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._read(worker, batch)
            if not worker.closed:
                self._watch(worker)

    def _read(self, worker: WorkerProcess, batch: Batch) -> None:
        for kind, payload in worker.receive():
            if kind is Kind.READY:
                worker.ready, worker.at_once = True, payload.at_once
                self._notices = payload.notices
            elif kind is Kind.BAD_REWARD:
                self.close()
                raise ValueError(payload)
            else:
                batch.finish(worker.pending.popleft(), payload)
                worker.deadline_s = time.monotonic() + self.options.timeout_s
                worker.retiring = kind is Kind.LAST_RESULT
        if worker.closed:
            self._ended(worker, batch)

    def _ended(self, worker: WorkerProcess, batch: Batch) -> None:
        exit_code = worker.kill(EXIT_GRACE_S)
        if not worker.ready:
            self.close()
            raise RewardError(
                f"a reward worker ended with exit code {exit_code} before it was ready; "
                "its own error message is above, on stderr"
            )
        if worker.pending and not worker.retiring:
            position = worker.pending.popleft()
            detail = (
                f"the reward worker ended with exit code {exit_code} (negative: killed by that "
                "signal, -9 is often the kernel's out-of-memory killer) while scoring this sample"
            )
            batch.fail(position, None, "error", detail)
            logger.warning("sample %d: %s", batch.requests[position].sample_id, detail)
        batch.give_back(worker.pending)
        self._replace(worker)

    def _overdue(self, worker: WorkerProcess, batch: Batch) -> None:
        if not worker.ready:
            self.close()
            raise RewardError(f"a reward worker was not ready after {START_LIMIT_S:.0f} s")
        position = worker.pending.popleft()
        detail = f"no score within {self.options.timeout_s:g} s"
        batch.fail(position, self.options.timeout_score, "timeout", detail)
        request = batch.requests[position]
        logger.warning(
            "sample %d: %s, reward set to %s; its worker is replaced; response: %.*r",
            request.sample_id,
            detail,
            self.options.timeout_score,
            MAX_LOGGED_CHARS,
            request.response,
        )
        batch.give_back(worker.pending)
        self._replace(worker)

    def take_back(self, batch: Batch) -> None:
        """Kills the workers that hold samples: they would answer later."""
        for worker in [worker for worker in self._workers if worker.pending]:
            batch.give_back(worker.pending)
            self._replace(worker)

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._setup, time.monotonic() + START_LIMIT_S)
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        return worker

    def _replace(self, worker: WorkerProcess) -> None:
        """Kill and start anew; the successor gets ready while the others work."""
        self._selector.unregister(worker.connection)
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _watch(self, worker: WorkerProcess) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.has_unsent else 0)
        if self._selector.get_key(worker.connection).events != events:
            self._selector.modify(worker.connection, events, worker)

    def _wait_until_ready(self) -> None:
        nothing = Batch(())
        while waiting := [worker for worker in self._workers if not worker.ready]:
            now_s = time.monotonic()
            self._pump(nothing, max(0.0, min(worker.deadline_s for worker in waiting) - now_s))
            for worker in waiting:
                if not worker.ready and worker.deadline_s <= now_s:
                    self._overdue(worker, nothing)


def _kill_all(
    workers: list[WorkerProcess], selector: selectors.BaseSelector, owner_pid: int
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked copy of the owner: the workers are not its to kill
    selector.close()
    for worker in workers:
        worker.kill()
    workers.clear()
