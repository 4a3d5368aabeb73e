"""The reward pool in a Ray cluster: actors anywhere, each with worker processes of its own.

An actor holds a `RewardPool` of one worker, so that the limits of a sample, the kill and the
replacement are those of the process pool on whatever node it is. What is new here is that a node
may be lost: its samples are scored by another actor.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.rewards.batch import Batch
from mindspeed_rl.rewards.pool_base import PoolBase, PoolOptions
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardError, RewardRequest, RewardResult
from mindspeed_rl.rewards.worker_process import worker_environment

logger = logging.getLogger(__name__)

START_LIMIT_S = 300.0  # an actor may have to wait for a node
MAX_LOST_ACTORS = 8  # in one batch


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            "--reward-pool ray needs the package ray: install the extra, "
            "pip install 'mindspeed-rl-megatron[ray]', or take --reward-pool process"
        ) from error
    return ray


class ActorPool:
    """What runs in an actor."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from mindspeed_rl.rewards.pool import RewardPool

        self._pool = RewardPool(**arguments)

    def notices(self) -> tuple[str, ...]:
        """Answers when the functions are loaded."""
        return self._pool.notices

    def score(self, requests: list[RewardRequest]) -> list[RewardResult]:
        """In order, one each."""
        return self._pool.score(requests)


class _Actor:
    """An actor and the samples it holds."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pending: deque[int] = deque()
        self.answer: Any = None


class RayRewardPool(PoolBase):
    """Scores samples in a Ray cluster; `score` and `scoring` as those of `RewardPool`.

    The cluster is that of ``RAY_ADDRESS``, or a local one that is started, and stopped by `close`.

    Args:
        specs: as of `RewardPool`; files must be where every node of the cluster can read them.
        num_workers: actors, each takes one CPU of the cluster.
        timeout_s: as of `RewardPool`, like all that follow.
        batch_timeout_s: likewise.
        timeout_score: likewise.
        memory_limit_bytes: likewise.
        max_error_rate: likewise.
        settings: likewise.

    Raises:
        ValueError: ray is not installed; an argument or a reward function is at fault.
        RewardError: an actor does not start.
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
        self._ray = _import_ray()
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            environment = worker_environment(os.environ)
            shared = {name: environment[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
            self._ray.init(
                runtime_env={"env_vars": shared},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        self._open = True
        self._num_lost = 0
        self._actors: list[_Actor] = []
        try:
            self._actors = [self._start_actor() for _ in range(num_workers)]
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _arguments(self) -> dict[str, Any]:
        options = self.options
        return {
            "specs": options.specs,
            "num_workers": 1,
            "timeout_s": options.timeout_s,
            "batch_timeout_s": options.batch_timeout_s,
            "timeout_score": options.timeout_score,
            "memory_limit_bytes": options.memory_limit_bytes,
            "max_error_rate": 1.0,  # the share is taken over the whole batch
            "settings": options.settings,
        }

    def _start_actor(self) -> _Actor:
        remote = self._ray.remote(num_cpus=1, max_restarts=0)(ActorPool)
        return _Actor(remote.remote(self._arguments()))

    def _wait_until_ready(self) -> None:
        asked = [actor.handle.notices.remote() for actor in self._actors]
        try:
            self._notices = tuple(self._ray.get(asked, timeout=START_LIMIT_S)[0])
        except self._ray.exceptions.GetTimeoutError as error:
            raise RewardError(
                f"--reward-pool ray: {len(asked)} actors of one CPU each were not ready after "
                f"{START_LIMIT_S:.0f} s; the cluster has too few free CPUs"
            ) from error
        except self._ray.exceptions.RayActorError as error:
            raise ValueError(f"--reward-pool ray: an actor does not start: {error}") from error

    @property
    def is_open(self) -> bool:
        """Whether it can still score."""
        return self._open

    def close(self) -> None:
        """Kill the actors, and stop the cluster where this pool has started it. Idempotent."""
        if not self._open:
            return
        self._open = False
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._actors = []
        if self._started_ray:
            self._ray.shutdown()

    def turn(self, batch: Batch, until_s: float) -> float:
        """As of the process pool; limits of samples are enforced where the actors are."""
        self._hand_out(batch)
        now_s = time.monotonic()
        busy = {actor.answer: actor for actor in self._actors if actor.pending}
        if busy:
            wait_s = max(0.0, until_s - now_s)
            ready, _ = self._ray.wait(list(busy), num_returns=1, timeout=wait_s)
            ready, _ = self._ray.wait(list(busy), num_returns=len(busy), timeout=0)
            for answer in ready:
                self._read(busy[answer], batch)
        self._hand_out(batch)
        return now_s

    def _hand_out(self, batch: Batch) -> None:
        for actor in self._actors:
            if batch.waiting and not actor.pending:
                # One at a time: an actor answers a call whole, so that samples of a longer one
                # which are done would be lost with those that are not at the limit of the batch.
                actor.pending.extend(batch.take(1))
                requests = [batch.requests[i] for i in actor.pending]
                actor.answer = actor.handle.score.remote(requests)

    def _read(self, actor: _Actor, batch: Batch) -> None:
        try:
            results = self._ray.get(actor.answer)
        except self._ray.exceptions.RayActorError as error:
            self._num_lost += 1
            if self._num_lost > MAX_LOST_ACTORS:
                raise RewardError(
                    f"--reward-pool ray: {self._num_lost} actors were lost; last: {error}"
                ) from error
            logger.warning("a reward actor was lost, its samples are scored again: %s", error)
            batch.give_back(actor.pending)
            self._replace(actor)
            return
        for position, result in zip(actor.pending, results, strict=True):
            batch.finish(position, result)
        actor.pending.clear()

    def take_back(self, batch: Batch) -> None:
        """Kills the actors that hold samples: they would answer later."""
        for actor in [actor for actor in self._actors if actor.pending]:
            batch.give_back(actor.pending)
            self._ray.kill(actor.handle)
            self._replace(actor)

    def _replace(self, actor: _Actor) -> None:
        self._actors[self._actors.index(actor)] = self._start_actor()
