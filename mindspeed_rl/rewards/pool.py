"""A pool of reward workers, each fed by a thread of its own.

The threads take samples from one queue, send them to their workers and wait for the results, so
that samples are scored while the caller does other work. A worker enforces the limits of a sample
(`worker_process`), the caller that of a batch (`Scoring.finish`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, Self

from mindspeed_rl.config.reward_spec import RewardSpec, check_specs
from mindspeed_rl.rewards.types import (
    RewardError,
    RewardRequest,
    RewardResult,
    RewardSettings,
    RewardStatus,
)
from mindspeed_rl.rewards.worker_process import WorkerProcess, failed_samples

LEAST_TIMED = 20  # samples that are judged together by the rate of their time-outs
JUDGE_S = 0.25  # how often the rates are judged while samples are still scored
TICK_S = 0.05  # how long a thread may wait for a result before it sees that the result is unwanted


class Worker(Protocol):
    """A worker that a thread of the pool feeds; see `WorkerProcess`."""

    ready: bool
    notices: tuple[str, ...]
    concurrency: int

    def restart(self) -> None:
        """Start the worker, or drop its samples and start it again."""
        ...

    def close(self) -> None:
        """End the worker. Idempotent."""
        ...

    def send(self, request: RewardRequest) -> None:
        """Send a sample to the worker."""
        ...

    def receive(self, wait_s: float) -> RewardResult | None:
        """Return the oldest sample's result; ``None`` when there is none after ``wait_s``."""
        ...


class _Sample(NamedTuple):
    request: RewardRequest
    result: Future[RewardResult]
    given_up: threading.Event  # of the whole scoring, not only of this sample


_Queue = SimpleQueue[_Sample | None]
_Waited = tuple[set[Future[RewardResult]], set[Future[RewardResult]]]


class RewardPool:
    """Scores samples in worker processes; see `score`.

    The constructor returns when all workers are ready, so a wrong reward fails at once. Use as a
    context manager or call `close`. Thread-safe. After an error of its own (`UsageError`,
    `RewardError` of a worker that does not start) it is closed.

    Args:
        settings: Reward flags: functions, number of workers, limits.
        batch_timeout_s: Wall-clock limit of one `score` call or `Scoring.finish`.

    Raises:
        UsageError: an unknown or unusable reward function.
        RewardError: a worker does not start.
    """

    def __init__(self, settings: RewardSettings, batch_timeout_s: float = 300.0) -> None:
        check_specs([RewardSpec.parse(text) for text in settings.flags.reward_function])
        self.settings = settings
        self.batch_timeout_s = batch_timeout_s
        self.workers = [self.new_worker() for _ in range(settings.flags.reward_num_workers)]
        self._lock = threading.Lock()
        # Samples of a status and all samples, since the last check of its rate.
        self._counts: dict[RewardStatus, tuple[int, int]] = {}
        self._samples: _Queue = SimpleQueue()
        closed, started = threading.Event(), [Future[None]() for _ in self.workers]
        threads = [
            threading.Thread(target=_feed, args=(worker, self._samples, ready, closed), daemon=True)
            for worker, ready in zip(self.workers, started, strict=True)
        ]
        for thread in threads:
            thread.start()
        # Runs once: at close(), at garbage collection or at exit, whichever is first.
        self._finalizer = weakref.finalize(self, _stop, threads, self._samples, closed)
        try:
            wait(started, return_when=FIRST_EXCEPTION)
            for ready in started:
                if ready.done():
                    ready.result()
        except BaseException:
            self.close()
            raise

    def new_worker(self) -> Worker:
        """Make a worker that is not started yet."""
        return WorkerProcess(self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        self._finalizer()

    @property
    def notices(self) -> tuple[str, ...]:
        """Remarks of the rewards about this machine, for the start of the log."""
        return self.workers[0].notices

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score ``requests``; return one result for each, in their order.

        A sample that takes longer than ``--reward-timeout-s`` costs its worker, which is replaced.
        Samples without a result at the limit of the batch time out.

        Raises:
            RewardError: more than ``--reward-max-error-rate`` of the samples failed, of small calls
                several together; a worker does not start.
            UsageError: a reward can no longer be loaded.
            RuntimeError: the pool is closed.
        """
        with self.scoring() as scoring:
            for request in requests:
                scoring.add(request)
            return scoring.finish()

    @contextmanager
    def scoring(self) -> Iterator[Scoring]:
        """Open a `Scoring` for samples that come one by one. Raises as `score`."""
        if not self._finalizer.alive:
            raise RuntimeError("this RewardPool is closed; create a new one")
        scoring = Scoring(self, self._samples)
        try:
            yield scoring
        finally:
            scoring.give_up()
            failed_samples.close()

    def check_error_rate(self, results: Sequence[RewardResult], to_come: int = 0) -> None:
        """Check the rates of errors and time-outs over enough samples, of several calls.

        There are enough when a single error is allowed, so that it ends no run. While samples are
        ``to_come`` nothing is noted, and only `LEAST_TIMED` failures or more are judged, as if all
        others were to succeed.

        Raises:
            RewardError: too many samples failed or timed out.
        """
        flags = self.settings.flags
        rate = flags.reward_max_error_rate
        if text := self._judge(results, "error", rate, 1 / rate if rate else 0.0, to_come):
            raise RewardError(
                f"{text} failed, above --reward-max-error-rate {rate:g}; fix the reward function "
                f"or the data. First failure, {_first(results, 'error')}"
            )
        rate = flags.reward_max_timeout_rate
        if text := self._judge(results, "timeout", rate, LEAST_TIMED, to_come):
            raise RewardError(
                f"{text} timed out, above --reward-max-timeout-rate {rate:g}; raise "
                f"--reward-timeout-s ({flags.reward_timeout_s:g}), or fix the reward function. "
                f"First time-out, {_first(results, 'timeout')}"
            )

    def forget_rates(self) -> None:
        """Forget the errors and time-outs so far: those of a trial are none of the run's."""
        with self._lock:
            self._counts.clear()

    def _judge(
        self,
        results: Sequence[RewardResult],
        status: RewardStatus,
        limit: float,
        enough: float,
        to_come: int,
    ) -> str:
        """Return the share of a status if it is above its limit, in words; else nothing."""
        new = sum(result.status == status for result in results)
        with self._lock:
            before, num_before = self._counts.get(status, (0, 0))
            failed, count = before + new, num_before + len(results)
            least = LEAST_TIMED if to_come else 1
            too_many = new >= least and failed > limit * max(count + to_come, enough)
            judged = too_many or count >= enough
            if too_many or not to_come:
                self._counts[status] = (0, 0) if judged else (failed, count)
        return f"{failed} of {count} rewards ({failed / count:.1%})" if too_many else ""


def _first(results: Sequence[RewardResult], status: RewardStatus) -> str:
    first = next(result for result in results if result.status == status)
    return f"sample {first.sample_id}:\n{first.detail}"


class Scoring:
    """Samples that come one by one, scored while the caller does other work."""

    def __init__(self, pool: RewardPool, queue: _Queue) -> None:
        self._pool = pool
        self._queue = queue
        self._samples: list[_Sample] = []
        self._given_up = threading.Event()

    @property
    def num_done(self) -> int:
        """Number of samples that have a result."""
        return sum(sample.result.done() for sample in self._samples)

    def add(self, request: RewardRequest) -> None:
        """Add a sample; a worker that is free scores it at once."""
        sample = _Sample(request, Future(), self._given_up)
        self._samples.append(sample)
        self._queue.put(sample)

    def give_up(self) -> None:
        """Kill the workers that hold samples of this scoring, and drop those in the queue."""
        self._given_up.set()

    def finish(self) -> list[RewardResult]:
        """Wait for all results and return them in the order of `add`; raises as `score`.

        The time limit of the batch starts here.
        """
        futures = [sample.result for sample in self._samples]
        done, late = self._wait(futures)
        if late:
            self.give_up()
        results = [
            sample.result.result() if sample.result in done else self._expired(sample.request)
            for sample in self._samples
        ]
        self._pool.check_error_rate(results)
        return results

    def _wait(self, futures: Sequence[Future[RewardResult]]) -> _Waited:
        """Return what is done at the limit of the batch, and what is not; raises as `score`."""
        end_s = time.monotonic() + self._pool.batch_timeout_s
        while True:
            wait_s = max(0.0, min(JUDGE_S, end_s - time.monotonic()))
            done, late = wait(futures, wait_s, return_when=FIRST_EXCEPTION)
            for future in done:
                if error := future.exception():
                    self._pool.close()
                    raise error
            if not late or time.monotonic() >= end_s:
                return done, late
            self._pool.check_error_rate([f.result() for f in futures if f in done], len(late))

    def _expired(self, request: RewardRequest) -> RewardResult:
        reward = self._pool.settings.flags.reward_timeout_score
        detail = f"the batch was not done within {self._pool.batch_timeout_s:g} s"
        failed_samples.warn("sample %d: %s; reward %s", request.sample_id, detail, reward)
        return RewardResult(request.sample_id, reward, {}, "timeout", detail)


def _feed(worker: Worker, queue: _Queue, started: Future[None], closed: threading.Event) -> None:
    """Run a thread of the pool; an error of its worker becomes that of all further samples."""
    held: deque[_Sample] = deque()
    try:
        worker.restart()
        while not worker.ready and not closed.is_set():
            worker.receive(TICK_S)
        started.set_result(None)
        while not closed.is_set():
            _hand_over(worker, queue, held)
            if any(sample.given_up.is_set() for sample in held):
                for sample in held:  # samples of another scoring are scored again
                    queue.put(sample)
                held.clear()
                worker.restart()
            elif held and (result := worker.receive(TICK_S)) is not None:
                held.popleft().result.set_result(result)
    except BaseException as error:
        if not started.done():
            started.set_exception(error)
        _fail(held, error)
        while not closed.is_set():
            if (further := queue.get()) is not None:
                further.result.set_exception(error)
    finally:
        worker.close()
        _fail(held, RuntimeError("this RewardPool was closed while it scored"))


def _hand_over(worker: Worker, queue: _Queue, held: deque[_Sample]) -> None:
    """Send samples until the worker is full; block for one only if it holds none."""
    while len(held) < worker.concurrency:
        try:
            sample = queue.get(block=not held)
        except Empty:
            return
        if sample is None:  # the pool is closed
            return
        if not sample.given_up.is_set():
            held.append(sample)
            worker.send(sample.request)


def _fail(samples: deque[_Sample], error: BaseException) -> None:
    while samples:
        samples.popleft().result.set_exception(error)


def _stop(threads: list[threading.Thread], queue: _Queue, closed: threading.Event) -> None:
    closed.set()
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # whichever collects the garbage
            thread.join()
    while not queue.empty():
        if (sample := queue.get()) is not None:
            sample.result.set_exception(RuntimeError("this RewardPool was closed"))
