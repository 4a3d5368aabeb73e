"""A small run in Ray: the real command, controller, actors, watchdog, with other work.

``python tests/support/ray_driver.py FLAGS``; ``MINDSPEED_RL_TEST_FAULT`` is
``rank:stage:step:action``: what happens on that rank in that stage.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan, check_rl
from mindspeed_rl.orchestration.limits import Limits
from mindspeed_rl.orchestration.ray_controller import drive
from mindspeed_rl.orchestration.stages import SampleIds, Stage
from mindspeed_rl.orchestration.torchrun import Job, check_run

PROG = "ray_driver"


def _raise() -> None:
    raise RuntimeError("planted fault")


def _stop() -> None:
    time.sleep(1.0)  # its phase gets into a heartbeat
    os.kill(os.getpid(), signal.SIGSTOP)


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "segfault": lambda: ctypes.string_at(0),
    "raise": _raise,
    "sleep": lambda: time.sleep(3600),
}


def rehearsal(job: Job[RLRunConfig, RLPlan]) -> Iterator[Stage]:
    """A collective in every stage, on as many values per sample as a response is long."""
    import torch
    import torch.distributed as dist

    from mindspeed_rl.config.rewards import RewardConfig
    from mindspeed_rl.rewards import RewardPool, RewardRequest, RewardSettings

    where, stage, step, action = os.environ.get("MINDSPEED_RL_TEST_FAULT", ":::").split(":")
    length = job.config.rollout.rollout_max_response_length
    values = torch.arange(64 * length, dtype=torch.float32)
    job.say(f"ranks {dist.get_world_size()}")
    for number in range(1, job.config.train.train_iters + 1):
        for name in ("rollout", "train"):
            ids = SampleIds.of(range(64)) if name == "train" else SampleIds()
            yield Stage(name, number, ids)
            with job.watchdog.phase(name):
                if (where, stage, step) == (str(job.world.rank), name, str(number)):
                    print("fault planted", flush=True)
                    ACTIONS[action]()
                dist.all_reduce(values)
    with RewardPool(RewardSettings(RewardConfig(reward_function=("format",)))) as pool:
        scored = pool.score([RewardRequest(0, "", "", "", "stop", 1)])
    job.say(f"sum {float(values.sum()):g} scored {len(scored)}")


def main() -> None:
    """Parse, check, drive."""
    start = time.monotonic()
    parsed = parse(RLRunConfig, sys.argv[1:], PROG)
    checked = check_run(parsed, check_rl, parsed.config.launch.num_ranks)
    limits = Limits(interval_s=0.4, silence_s=5.0, patience_s=1.6, linger_s=1.2)
    code = drive(PROG, checked, sys.argv[1:], limits, "support.ray_driver:rehearsal")
    print(f"ended after {time.monotonic() - start:.1f} s", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
