"""What all reward pools share: limits, samples that come one by one, the verdict on errors."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mindspeed_rl.config.reward_spec import RewardSpec, check_specs
from mindspeed_rl.rewards.batch import Batch
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardError, RewardRequest, RewardResult

logger = logging.getLogger(__name__)

MAX_LOGGED_CHARS = 300
MAX_CHUNK = 32


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a pool scores with, and its limits; see `RewardPool`.

    Raises:
        ValueError: one is out of range, or there is no function, or two of one name.
    """

    specs: tuple[RewardSpec, ...]
    num_workers: int
    timeout_s: float
    batch_timeout_s: float
    timeout_score: float | None
    memory_limit_bytes: int | None
    max_error_rate: float
    settings: RewardSettings

    def __post_init__(self) -> None:
        check_specs(self.specs)
        score, memory = self.timeout_score, self.memory_limit_bytes
        for name, allowed, want in (
            ("num_workers", self.num_workers >= 1, "at least 1"),
            ("timeout_s", self.timeout_s > 0, "above 0"),
            ("batch_timeout_s", self.batch_timeout_s >= self.timeout_s, "at least timeout_s"),
            ("timeout_score", score is None or math.isfinite(score), "a finite number or None"),
            ("memory_limit_bytes", memory is None or memory > 0, "above 0, or None for no limit"),
            ("max_error_rate", 0 <= self.max_error_rate <= 1, "in [0, 1]"),
        ):
            if not allowed:
                raise ValueError(f"RewardPool: {name} is {getattr(self, name)}, must be {want}")


class PoolBase(ABC):
    """A reward pool but for where its workers are. A context manager that closes it."""

    def __init__(self, options: PoolOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._notices: tuple[str, ...] = ()
        self._num_errors = self._num_results = 0  # since the rate was last judged

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Stop the workers. Idempotent."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it can still score."""

    @abstractmethod
    def turn(self, batch: Batch, until_s: float) -> float:
        """Hand out, then wait for the next answer or limit, but not longer than ``until_s``.

        Returns:
            When it began to wait: all answers sent before have been read.
        """

    @abstractmethod
    def take_back(self, batch: Batch) -> None:
        """What workers hold of the batch waits again; none of them will answer for it."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What the rewards have to say about this machine, for the start of the log."""
        return self._notices

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score ``requests``; results are in their order, one each.

        A sample that takes longer than ``timeout_s`` costs its worker, which is replaced; the other
        samples of that worker are scored by another. What is open at ``batch_timeout_s`` times out.

        Raises:
            RewardError: more than ``max_error_rate`` of the samples failed, of small calls several
                together; workers do not start.
            RuntimeError: the pool is closed.
        """
        with self.scoring() as scoring:
            for request in requests:
                scoring.add(request)
            return scoring.finish()

    @contextmanager
    def scoring(self) -> Iterator[Scoring]:
        """Samples that come one by one; see `Scoring`. Raises as `score`."""
        with self._lock:
            if not self.is_open:
                raise RuntimeError("this RewardPool is closed; create a new one")
            batch = Batch()
            try:
                self.turn(batch, 0.0)  # notices workers which died since the last call
                yield Scoring(self, batch)
            finally:
                if self.is_open:  # holds samples only after an exception
                    self.take_back(batch)

    def finish(self, batch: Batch) -> list[RewardResult]:
        """Wait for all of the batch, at most for its limit."""
        limit_s = time.monotonic() + self.options.batch_timeout_s
        while batch.num_open:
            read_until_s = self.turn(batch, limit_s)
            if limit_s <= read_until_s and batch.num_open:
                self._expire(batch)
        results = batch.results()
        self._check_error_rate(results)
        return results

    def _expire(self, batch: Batch) -> None:
        """Time out everything open, at the limit of the whole batch."""
        self.take_back(batch)
        positions = sorted(batch.take(len(batch.waiting)))
        score = self.options.timeout_score
        detail = f"the batch was not done within {self.options.batch_timeout_s:g} s"
        for position in positions:
            batch.fail(position, score, "timeout", detail)
        logger.warning(
            "%s: %d of %d samples get reward %s, ids %.*s",
            detail,
            len(positions),
            len(batch.requests),
            score,
            MAX_LOGGED_CHARS,
            [batch.requests[position].sample_id for position in positions],
        )

    def _check_error_rate(self, results: Sequence[RewardResult]) -> None:
        """Judges as many samples as a single failure is within the limit of, of several calls."""
        limit = self.options.max_error_rate
        enough = 1 / limit if limit else 0.0
        errors = [result for result in results if result.status == "error"]
        failed, count = self._num_errors + len(errors), self._num_results + len(results)
        too_many = bool(errors) and failed > limit * max(count, enough)
        judged = too_many or count >= enough
        self._num_errors, self._num_results = (0, 0) if judged else (failed, count)
        if too_many:
            raise RewardError(
                f"{failed} of {count} rewards failed ({failed / count:.1%}), above the limit of "
                f"{limit:.1%}; fix the reward function or the data. First failure, "
                f"sample {errors[0].sample_id}:\n{errors[0].detail}"
            )


class Scoring:
    """Samples that come one by one, scored while the caller does other work between the calls."""

    def __init__(self, pool: PoolBase, batch: Batch) -> None:
        self._pool = pool
        self._batch = batch

    @property
    def num_done(self) -> int:
        """Samples whose result is there."""
        return len(self._batch.requests) - self._batch.num_open

    def add(self, request: RewardRequest) -> None:
        """A further sample. Cheap; workers get it at the next call of `poll` or `finish`."""
        self._batch.add(request)

    def poll(self) -> None:
        """Hand out, collect, and kill what has run too long. Never waits."""
        self._pool.turn(self._batch, 0.0)

    def finish(self) -> list[RewardResult]:
        """Wait for the rest, then all results in the order of `add`; raises as `score`.

        The limit of the batch begins here.
        """
        return self._pool.finish(self._batch)
