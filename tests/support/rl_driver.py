"""An entry with a planted fault, ``tests/support/rl_driver.py``, for torchrun or in Ray.

Environment (`jobs.planted`): ``MINDSPEED_RL_TEST_MAIN`` is ``train_rl`` (the real one) or
``rehearsal``: the same phases with a gloo collective or a reward worker in each, without vLLM, and
with a watchdog of less patience. ``MINDSPEED_RL_TEST_FAULT`` is ``rank:phase:entry:action``: what
happens on that rank when it enters that phase for the n-th time; of several, with ";" between them,
each start of the job has its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from mindspeed_rl import train_rl
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.attempt import number_of_restarts
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.failures import WatchdogSettings
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl

REHEARSED_STEPS = 3
REHEARSED_PHASES = ("build engine", "reshard", "generate", "reward", "exchange", "train", "export")
COLLECTIVE_PHASES = ("build engine", "reshard", "exchange", "train", "export")


@dataclass(frozen=True, slots=True)
class Fault:
    rank: int
    phase: str
    entry: int
    action: str


def _raise() -> None:
    raise RuntimeError("planted fault")


def _mistake() -> None:
    raise UsageError("--lr 7: too large")


def _keep_python_lock() -> None:
    ctypes.PyDLL(None).sleep(3600)  # PyDLL does not release it


def _loop() -> None:
    while True:
        pass


SPOILED = "model.layers.1.mlp.down_proj.weight"


def _spoil_reshard(spoil: Callable[[Any, Any], None]) -> None:
    """From now on ``spoil(arriving, parameters)`` happens to a tensor of every round."""
    from mindspeed_rl.weights.exchange import Exchange

    take = Exchange._take

    def spoiled(self: Any) -> None:
        before = self._write[SPOILED].clone()
        take(self)
        if any(SPOILED in t.dst_params for transfers, _ in self._arriving for t in transfers):
            spoil(self._write[SPOILED], before)

    Exchange._take = spoiled  # type: ignore[method-assign]


def _kill_between_rounds() -> None:
    """Die when the first round of the reshard has arrived and the second is on its way."""
    from mindspeed_rl.weights.exchange import Exchange

    take = Exchange._take

    def last_breath(self: Any) -> None:
        take(self)
        os.kill(os.getpid(), signal.SIGKILL)

    Exchange._take = last_breath  # type: ignore[method-assign]


def _kill_in_copy() -> None:
    """Die when the next copy for a restart is written, and not valid yet."""
    from mindspeed_rl.peers.files import StateFile

    def last_breath(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    StateFile.mark = last_breath  # type: ignore[method-assign,assignment]


def _flip_bit(param: Any, _before: Any) -> None:
    import torch

    param.view(torch.int32)[3, 5] ^= 1


def _drop_tensor(param: Any, before: Any) -> None:
    param.copy_(before)


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _raise,
    "mistake": _mistake,
    "pause": lambda: time.sleep(3),
    "sleep": lambda: time.sleep(3600),
    "loop": _loop,
    "native": _keep_python_lock,
    "kill-in-rounds": _kill_between_rounds,
    "kill-in-copy": _kill_in_copy,
    "flip": lambda: _spoil_reshard(_flip_bit),
    "drop": lambda: _spoil_reshard(_drop_tensor),
}


def wait_until_told(watchdog: Any, rank: int, phase: str) -> None:
    """Return when the other ranks can read in which phase this one is."""
    while watchdog._store.beats([rank])[rank].phase != phase:
        time.sleep(0.02)


class FaultyWatchdog:
    """The job's watchdog; a fault happens on the n-th entry of a phase."""

    def __init__(self, watchdog: Any, fault: Fault | None) -> None:
        self._watchdog = watchdog
        self._fault = fault
        self._entries = 0

    @contextmanager
    def phase(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        with self._watchdog.phase(name, timeout_s):
            if self._fault is not None and name == self._fault.phase:
                self._entries += 1
                if self._entries == self._fault.entry:
                    print("fault planted", flush=True)
                    wait_until_told(self._watchdog, self._fault.rank, name)
                    ACTIONS[self._fault.action]()
            yield


def planted_fault(rank: int) -> Fault | None:
    text = os.environ.get("MINDSPEED_RL_TEST_FAULT")
    if not text:
        return None
    faults = text.split(";")
    start = number_of_restarts()
    if start >= len(faults) and not faults[-1].endswith("-always"):
        return None
    where, phase, entry, action = faults[min(start, len(faults) - 1)].split(":")
    action = action.removesuffix("-always")
    return Fault(rank, phase, int(entry), action) if int(where) == rank else None


def rehearsal(job: Job[RLRunConfig, RLPlan]) -> None:
    """The phases of a run without its work."""
    import torch
    import torch.distributed as dist

    from mindspeed_rl.config.rewards import RewardConfig
    from mindspeed_rl.rewards import RewardPool, RewardRequest, RewardSettings

    with RewardPool(RewardSettings(RewardConfig(reward_function=("format",)))) as pool:
        dist.barrier()
        job.log_rank0("rehearsal starts")
        for step in range(REHEARSED_STEPS):
            for name in REHEARSED_PHASES:
                with job.watchdog.phase(name):
                    if name in COLLECTIVE_PHASES:
                        dist.all_reduce(torch.ones(1))
                    elif name == "reward":
                        pool.score([RewardRequest(step, "", "", "", "stop", 1)])


def main(job: Job[RLRunConfig, RLPlan]) -> None:
    body = train_rl.main if os.environ["MINDSPEED_RL_TEST_MAIN"] == "train_rl" else rehearsal
    watchdog = FaultyWatchdog(job.watchdog, planted_fault(job.world.rank))
    body(replace(job, watchdog=cast(Any, watchdog)))


if __name__ == "__main__":
    quick = WatchdogSettings(
        interval_s=0.4, silence_s=15.0, import_silence_s=15.0, cause_timeout_s=1.6, exit_grace_s=1.2
    )
    settings = quick if os.environ["MINDSPEED_RL_TEST_MAIN"] == "rehearsal" else WatchdogSettings()
    run_entry("support.rl_driver", RLRunConfig, plan_rl, main, settings=settings)
