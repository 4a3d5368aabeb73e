"""The reward pool in a Ray cluster: each worker is an actor, which enforces the limits of a sample.

An actor holds a `WorkerProcess`, so that limits, the kill and the replacement are those of the
process pool, on any node. When a node is lost, another actor replaces its actor and scores the
sample again.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.installed import import_ray
from mindspeed_rl.rewards.pool import RewardPool, Worker
from mindspeed_rl.rewards.types import RewardError, RewardRequest, RewardResult, RewardSettings
from mindspeed_rl.rewards.worker_process import WorkerProcess, worker_environment

logger = logging.getLogger(__name__)

START_LIMIT_S = 300.0  # an actor may have to wait for a node
MAX_LOST_ACTORS = 3  # a sample that costs as many actors becomes an error


class _RewardActor:
    """The code that runs in an actor: it owns a `WorkerProcess`."""

    def __init__(self, settings: RewardSettings) -> None:
        self._worker = WorkerProcess(settings)
        self._worker.restart()

    def start(self) -> tuple[str, ...]:
        """Return the notices once the functions are loaded; raises as `WorkerProcess.receive`."""
        while not self._worker.ready:
            self._worker.receive(1.0)
        return self._worker.notices

    def score(self, request: RewardRequest) -> RewardResult:
        self._worker.send(request)
        while (result := self._worker.receive(1.0)) is None:
            pass
        return result


class RayWorker:
    """A reward worker in an actor that takes one CPU of the cluster; see `pool.Worker`."""

    concurrency = 1

    def __init__(self, ray: Any, settings: RewardSettings) -> None:
        self.ready = False
        self.notices: tuple[str, ...] = ()
        self.actor: Any = None
        self._ray = ray
        self._settings = settings
        self._calls: deque[Any] = deque()  # pending calls of the actor, oldest first
        self._request: RewardRequest  # the sample that it holds
        self._num_lost = 0  # number of actors that this sample has cost
        self._deadline_s = 0.0  # of the start

    def restart(self) -> None:
        self.close()
        # Ray restarts no actor: it would wait for a free CPU, and repeat a crash, without end.
        actor_type = self._ray.remote(num_cpus=1, max_restarts=0)(_RewardActor)
        self.actor = actor_type.remote(self._settings)
        self._calls = deque([self.actor.start.remote()])
        self.ready, self._deadline_s = False, time.monotonic() + START_LIMIT_S

    def close(self) -> None:
        if self.actor is not None and self._ray.is_initialized():
            self._ray.kill(self.actor)
        self.actor = None

    def send(self, request: RewardRequest) -> None:
        self._request, self._num_lost = request, 0
        self._calls.append(self.actor.score.remote(request))

    def receive(self, wait_s: float) -> RewardResult | None:
        """Return the sample's result; ``None`` when there is none after ``wait_s``.

        Raises:
            UsageError: a reward cannot be loaded.
            RewardError: the actor does not start.
        """
        if not self._ray.wait([self._calls[0]], timeout=wait_s)[0]:
            if not self.ready and time.monotonic() > self._deadline_s:
                raise RewardError(
                    f"--reward-pool ray: an actor of one CPU was not ready after "
                    f"{START_LIMIT_S:.0f} s; the cluster has too few free CPUs"
                )
            return None
        try:
            answer = self._ray.get(self._calls.popleft())
        except self._ray.exceptions.RayActorError as error:
            if not self.ready:
                raise RewardError(f"--reward-pool ray: an actor does not start: {error}") from error
            return self._lost(error)
        if not self.ready:
            self.ready, self.notices = True, answer
            return None
        result: RewardResult = answer
        return result

    def _lost(self, error: Exception) -> RewardResult | None:
        """Start another actor, which scores the sample again unless it cost too many."""
        self._num_lost += 1
        self.restart()
        sample = self._request.sample_id
        if self._num_lost < MAX_LOST_ACTORS:
            logger.warning("a reward actor was lost, sample %d is scored again: %s", sample, error)
            self._calls.append(self.actor.score.remote(self._request))
            return None
        detail = f"{MAX_LOST_ACTORS} Ray actors were lost that scored this sample: {error}"
        return RewardResult(sample, None, {}, "error", detail)


class RayRewardPool(RewardPool):
    """Scores samples in a Ray cluster; everything else is as in `RewardPool`.

    The cluster is that of ``RAY_ADDRESS``, or a local one that the pool starts and `close` stops.
    Files of rewards must be where every node of the cluster can read them.

    Raises:
        UsageError: ray is not installed, or a reward function is at fault.
        RewardError: an actor does not start.
    """

    def __init__(self, settings: RewardSettings, batch_timeout_s: float = 300.0) -> None:
        self._ray = import_ray("--reward-pool ray", "take --reward-pool process")
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            environment = worker_environment(os.environ)
            shared = {name: environment[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
            # Left alone, Ray joins whatever cluster a file in /tmp names, and listens on all
            # interfaces where it starts its own.
            address = os.environ.get("RAY_ADDRESS", "")
            own = {"address": "local", "_node_ip_address": "127.0.0.1", "include_dashboard": False}
            self._ray.init(
                runtime_env={"env_vars": shared},
                **({"address": address} if address else own),
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        super().__init__(settings, batch_timeout_s)

    def new_worker(self) -> Worker:
        return RayWorker(self._ray, self.settings)

    def close(self) -> None:
        """Kill the actors, and stop the cluster if this pool started it. Idempotent."""
        super().close()
        if self._started_ray and self._ray.is_initialized():
            self._ray.shutdown()


def make_reward_pool(config: RLRunConfig) -> RewardPool:
    """Start the reward processes or actors of this rank's engine.

    Raises:
        UsageError: ``--reward-pool ray`` without ray.
    """
    pool = RayRewardPool if config.rewards_in_ray else RewardPool
    limit = config.rollout.rollout_max_response_length
    return pool(RewardSettings(config.rewards, limit), config.logging.phase_limit_s)
