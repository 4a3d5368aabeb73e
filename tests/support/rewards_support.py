"""What the reward tests share: a file of user functions, requests, a look at processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from mindspeed_rl.config.rewards import RewardConfig
from mindspeed_rl.rewards import RewardPool, RewardRequest, RewardSettings
from mindspeed_rl.rewards.worker_process import WorkerProcess

USER_FILE = Path(__file__).with_name("data_rewards.py")


def settings(*functions: str, workers: int = 1, **flags: Any) -> RewardSettings:
    """Flags without their prefix ``reward_``; functions without a dot are built in or of USER_FILE.

    A colon in front names one of the file.
    """
    named = tuple(f"{USER_FILE}{name}" if name.startswith(":") else name for name in functions)
    values = {f"reward_{name}": value for name, value in flags.items()}
    return RewardSettings(RewardConfig(reward_function=named, reward_num_workers=workers, **values))


def make_pool(*functions: str, batch_timeout_s: float = 300.0, **flags: Any) -> RewardPool:
    """A pool of one worker, or of ``workers``; see `settings`."""
    return RewardPool(settings(*functions, **flags), batch_timeout_s)


def worker_pids(pool: RewardPool) -> tuple[int, ...]:
    """Process ids of the workers of this machine."""
    return tuple(worker.pid for worker in pool.workers if isinstance(worker, WorkerProcess))


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def is_running(pid: int) -> bool:
    """Whether any thread of a process is left: the first may end before the others."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def make_requests(*responses: str, answer: str = "") -> list[RewardRequest]:
    return [
        RewardRequest(100 + i, "question", response, answer, "stop", 5)
        for i, response in enumerate(responses)
    ]
