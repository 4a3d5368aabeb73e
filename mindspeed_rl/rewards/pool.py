"""A pool of reward workers with a hard limit on every sample (R41, R42).

One thread, the caller's: `RewardPool.score` hands out chunks, collects results and kills what runs
too long. Workers answer sample by sample, so the clock of a worker restarts at each answer.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from mindspeed_rl.rewards.registry import RewardSpec
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardRequest,
    RewardResult,
    RewardStatus,
    status_rate,
)
from mindspeed_rl.rewards.wire import Kind
from mindspeed_rl.rewards.worker_process import WorkerProcess, WorkerSetup

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # user files may import torch from a cold network file system
EXIT_GRACE_S = 1.0
MAX_CHUNK = 32
MAX_LOGGED_CHARS = 300


class _Batch:
    """The samples of one `score` call: which wait, which are scored."""

    def __init__(self, requests: Sequence[RewardRequest]) -> None:
        self.requests = requests
        self.results: list[RewardResult | None] = [None] * len(requests)
        self.waiting = deque(range(len(requests)))
        self.num_open = len(requests)

    def take(self, num: int) -> list[int]:
        return [self.waiting.popleft() for _ in range(min(num, len(self.waiting)))]

    def give_back(self, positions: deque[int]) -> None:
        self.waiting.extendleft(reversed(positions))
        positions.clear()

    def finish(self, position: int, result: RewardResult) -> None:
        assert self.results[position] is None, f"sample at {position} scored twice"
        self.results[position] = result
        self.num_open -= 1

    def fail(self, position: int, reward: float | None, status: RewardStatus, detail: str) -> None:
        sample_id = self.requests[position].sample_id
        self.finish(position, RewardResult(sample_id, reward, {}, status, detail))


class RewardPool:
    """Scores samples in worker processes; see `score`.

    The constructor returns when all workers are ready, so a wrong reward name fails at once. Use as
    a context manager or call `close`. Thread-safe; calls run one after the other. Create it in a
    thread that lives as long as the pool: on Linux workers die with the thread that started them.

    Args:
        specs: the reward functions: `RewardSpec` or its command line syntax.
        num_workers: processes, at least 1.
        timeout_s: wall-clock limit of one sample over all its functions.
        batch_timeout_s: wall-clock limit of one `score` call.
        timeout_score: reward of a sample that ran out of time; ``None`` leaves it out (R43).
        memory_limit_bytes: memory (address space) a worker may use on top of its imports; ``None``
            for no limit.
        max_error_rate: share of failed samples in one call above which `score` raises.

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
    ) -> None:
        parsed = tuple(RewardSpec.parse(spec) if isinstance(spec, str) else spec for spec in specs)
        _check_specs(parsed)
        _check_range("num_workers", num_workers, num_workers >= 1, "at least 1")
        _check_range("timeout_s", timeout_s, timeout_s > 0, "above 0")
        _check_range(
            "batch_timeout_s", batch_timeout_s, batch_timeout_s >= timeout_s, "at least timeout_s"
        )
        _check_range(
            "timeout_score",
            timeout_score,
            timeout_score is None or math.isfinite(timeout_score),
            "a finite number or None",
        )
        _check_range(
            "memory_limit_bytes",
            memory_limit_bytes,
            memory_limit_bytes is None or memory_limit_bytes > 0,
            "above 0, or None for no limit",
        )
        _check_range("max_error_rate", max_error_rate, 0 <= max_error_rate <= 1, "in [0, 1]")
        self._setup = WorkerSetup(parsed, memory_limit_bytes)
        self._timeout_s = timeout_s
        self._batch_timeout_s = batch_timeout_s
        self._timeout_score = timeout_score
        self._max_error_rate = max_error_rate
        self._lock = threading.Lock()
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

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        self._finalizer()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the current workers, for diagnosis."""
        return tuple(worker.process.pid for worker in self._workers)

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score ``requests``; results are in their order, one each.

        A sample that takes longer than ``timeout_s`` costs its worker, which is replaced; the other
        samples of that worker are scored by another. What is open at ``batch_timeout_s`` times out.

        Raises:
            RewardError: more than ``max_error_rate`` of the samples failed; workers do not start.
            RuntimeError: the pool is closed.
        """
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("this RewardPool is closed; create a new one")
            batch = _Batch(requests)
            try:
                self._run(batch)
            finally:
                # Only after an exception: a worker that still holds samples would answer later.
                for worker in [worker for worker in self._workers if worker.pending]:
                    self._replace(worker)
        results = [result for result in batch.results if result is not None]
        assert len(results) == len(requests), (len(results), len(requests))
        self._check_error_rate(results)
        return results

    def _run(self, batch: _Batch) -> None:
        limit_s = time.monotonic() + self._batch_timeout_s
        self._pump(batch, 0.0)  # notices workers which died since the last call
        while batch.num_open:
            self._hand_out(batch)
            now_s = time.monotonic()
            deadlines_s = [w.deadline_s for w in self._workers if w.pending or not w.ready]
            self._pump(batch, max(0.0, min([limit_s, *deadlines_s]) - now_s))
            # Answers sent before now_s have been read, however late this process was scheduled.
            for worker in list(self._workers):
                if worker.deadline_s <= now_s and (worker.pending or not worker.ready):
                    self._overdue(worker, batch)
            if limit_s <= now_s and batch.num_open:
                self._expire(batch)

    def _hand_out(self, batch: _Batch) -> None:
        """Give each idle worker a share of what waits: large at first, single samples at last."""
        for worker in self._workers:
            if not batch.waiting:
                return
            if worker.ready and not worker.pending and not worker.closed:
                share = len(batch.waiting) // (2 * len(self._workers))
                positions = batch.take(max(1, min(share, MAX_CHUNK)))
                worker.send_requests(positions, [batch.requests[i] for i in positions])
                worker.deadline_s = time.monotonic() + self._timeout_s
                self._watch(worker)

    def _pump(self, batch: _Batch, wait_s: float) -> None:
        """Wait for the sockets for at most ``wait_s``, then move what can be moved."""
        for key, events in self._selector.select(wait_s):
            worker: WorkerProcess = key.data
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._read(worker, batch)
            if not worker.closed:
                self._watch(worker)

    def _read(self, worker: WorkerProcess, batch: _Batch) -> None:
        for kind, payload in worker.receive():
            if kind is Kind.READY:
                worker.ready = True
            elif kind is Kind.BAD_REWARD:
                self.close()
                raise ValueError(payload)
            else:
                batch.finish(worker.pending.popleft(), payload)
                worker.deadline_s = time.monotonic() + self._timeout_s
                worker.retiring = kind is Kind.LAST_RESULT
        if worker.closed:
            self._ended(worker, batch)

    def _ended(self, worker: WorkerProcess, batch: _Batch) -> None:
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

    def _overdue(self, worker: WorkerProcess, batch: _Batch) -> None:
        if not worker.ready:
            self.close()
            raise RewardError(f"a reward worker was not ready after {START_LIMIT_S:.0f} s")
        position = worker.pending.popleft()
        detail = f"no score within {self._timeout_s:g} s"
        batch.fail(position, self._timeout_score, "timeout", detail)
        request = batch.requests[position]
        logger.warning(
            "sample %d: %s, reward set to %s; its worker is replaced; response: %.*r",
            request.sample_id,
            detail,
            self._timeout_score,
            MAX_LOGGED_CHARS,
            request.response,
        )
        batch.give_back(worker.pending)
        self._replace(worker)

    def _expire(self, batch: _Batch) -> None:
        """Time out everything open, at the limit of the whole batch."""
        for worker in [worker for worker in self._workers if worker.pending]:
            batch.give_back(worker.pending)
            self._replace(worker)
        positions = sorted(batch.take(len(batch.waiting)))
        detail = f"the batch was not done within {self._batch_timeout_s:g} s"
        for position in positions:
            batch.fail(position, self._timeout_score, "timeout", detail)
        logger.warning(
            "%s: %d of %d samples get reward %s, ids %.*s",
            detail,
            len(positions),
            len(batch.requests),
            self._timeout_score,
            MAX_LOGGED_CHARS,
            [batch.requests[position].sample_id for position in positions],
        )

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
        nothing = _Batch(())
        while waiting := [worker for worker in self._workers if not worker.ready]:
            now_s = time.monotonic()
            self._pump(nothing, max(0.0, min(worker.deadline_s for worker in waiting) - now_s))
            for worker in waiting:
                if not worker.ready and worker.deadline_s <= now_s:
                    self._overdue(worker, nothing)

    def _check_error_rate(self, results: Sequence[RewardResult]) -> None:
        rate = status_rate(results, "error")
        if rate > self._max_error_rate:
            errors = [result for result in results if result.status == "error"]
            raise RewardError(
                f"{len(errors)} of {len(results)} rewards failed ({rate:.1%}), above the limit of "
                f"{self._max_error_rate:.1%}; fix the reward function or the data. First failure, "
                f"sample {errors[0].sample_id}:\n{errors[0].detail}"
            )


def _check_specs(specs: Sequence[RewardSpec]) -> None:
    if not specs:
        raise ValueError("--reward-function: none given; name at least one, e.g. 'math'")
    labels = [spec.label for spec in specs]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"--reward-function: two are called {label!r}: {[spec.name for spec in specs]}; "
                "their scores are logged by this name, rename one"
            )


def _check_range(name: str, value: object, allowed: bool, want: str) -> None:
    if not allowed:
        raise ValueError(f"RewardPool: {name} is {value}, must be {want}")


def _kill_all(
    workers: list[WorkerProcess], selector: selectors.BaseSelector, owner_pid: int
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked copy of the owner: the workers are not its to kill
    selector.close()
    for worker in workers:
        worker.kill()
    workers.clear()
