"""A small run in Ray: the real command, driver, actors and watchdog, with other work.

``python tests/support/ray_driver.py FLAGS``; ``MINDSPEED_RL_TEST_FAULT`` is ``rank:phase:action``:
what happens on that rank in that phase of the second step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.failures import WatchdogSettings
from mindspeed_rl.launch.job import Job, check_run
from mindspeed_rl.launch.ray import drive
from mindspeed_rl.planning.run_plan import RLPlan, check_rl

PROG = "ray_driver"


def _raise() -> None:
    raise RuntimeError("planted fault")


def _mistake() -> None:
    raise UsageError("--lr 7: too large")


def _stop() -> None:
    time.sleep(1.0)  # its phase gets into a heartbeat
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill() -> None:
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": _kill,
    "stop": _stop,
    "raise": _raise,
    "mistake": _mistake,
    "sleep": lambda: time.sleep(3600),
}


def rehearsal(job: Job[RLRunConfig, RLPlan]) -> None:
    """A collective in every phase of two steps."""
    import torch
    import torch.distributed as dist

    where, phase, action = os.environ.get("MINDSPEED_RL_TEST_FAULT", "::").split(":")
    job.log_rank0(f"ranks {dist.get_world_size()}")
    for step in (1, 2):
        for name in ("rollout", "train"):
            with job.watchdog.phase(name):
                if (where, phase, step) == (str(job.world.rank), name, 2):
                    print("fault planted", flush=True)
                    ACTIONS[action]()
                dist.all_reduce(torch.ones(1))


def main() -> None:
    """Parse, check, drive."""
    parsed = parse(RLRunConfig, sys.argv[1:], PROG)
    checked = check_run(parsed, check_rl, parsed.config.launch.num_ranks)
    settings = WatchdogSettings(
        interval_s=0.4, silence_s=15.0, cause_timeout_s=1.6, exit_grace_s=1.2
    )
    sys.exit(drive(PROG, checked, sys.argv[1:], settings, "support.ray_driver:rehearsal"))


if __name__ == "__main__":
    main()
