"""The reward worker: ``python -m mindspeed_rl.rewards.worker FD PARENT_PID``, started by the pool.

It is a process of its own, with its own main thread, so that libraries which need signals work
and a stuck function can be killed. It imports nothing that the reward functions do not need.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.core.cores import release_process
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.registry import warm_up_reward
from mindspeed_rl.rewards.sandbox_launcher import die_with_parent
from mindspeed_rl.rewards.scoring import WeightedReward, is_scored_by, score_sample
from mindspeed_rl.rewards.types import RewardRequest, RewardResult, RewardSettings
from mindspeed_rl.rewards.wire import Ready, Scored, encode


def limit_memory(growth_bytes: int) -> None:
    """Let the address space grow by at most ``growth_bytes`` from here (Linux)."""
    if sys.platform != "linux":
        return  # RLIMIT_AS is not enforced there
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + growth_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))


def load(settings: RewardSettings) -> list[WeightedReward]:
    """Load the functions of ``--reward-function``, and run their slow imports."""
    specs = [RewardSpec.parse(text) for text in settings.flags.reward_function]
    rewards = [WeightedReward.from_spec(spec, settings) for spec in specs]
    for spec in specs:
        warm_up_reward(spec)
    return rewards


def serve(connection: Connection) -> None:
    """Load the functions, then score until the parent closes its end (`EOFError`)."""
    settings: RewardSettings = connection.recv()
    try:
        rewards = load(settings)
    except UsageError as error:
        connection.send_bytes(encode(error))
        return
    limit_memory(int(settings.flags.reward_memory_limit_gb * 2**30))
    functions = [reward.function for reward in rewards]
    notices = [getattr(function, "notice", "") for function in functions]
    concurrency = max(getattr(function, "concurrency", 1) for function in functions)
    connection.send_bytes(encode(Ready(tuple(filter(None, notices)), concurrency)))
    weights, row_key = {r.label: r.weight for r in rewards}, settings.flags.reward_key

    def begin(request: RewardRequest) -> None:
        for reward in rewards:  # rewards that wait for a server ask it at once
            if hasattr(reward.function, "prefetch") and is_scored_by(
                reward.label, weights, request, row_key
            ):
                reward.function.prefetch(request)

    waiting: SimpleQueue[RewardRequest | BaseException] = SimpleQueue()
    reader = threading.Thread(target=receive, args=(connection, begin, waiting), daemon=True)
    reader.start()
    while True:
        request = waiting.get()
        if isinstance(request, BaseException):
            raise request
        try:
            connection.send_bytes(encode(Scored(score_sample(rewards, request, row_key))))
        except MemoryError:
            detail = "MemoryError: the reward function ran into the worker's memory limit"
            result = RewardResult(request.sample_id, None, {}, "error", detail)
            # What filled the memory may live on in caches and globals: a new process is needed.
            connection.send_bytes(encode(Scored(result, is_last=True)))
            return


def receive(
    connection: Connection,
    begin: Callable[[RewardRequest], None],
    waiting: SimpleQueue[RewardRequest | BaseException],
) -> None:
    """Prefetch every sample when it comes, also while another is scored, and queue it.

    Ends with the connection, whose error is queued behind the samples that came before.
    """
    try:
        while True:
            request: RewardRequest = connection.recv()
            begin(request)
            waiting.put(request)
    except BaseException as error:  # the main thread raises it
        waiting.put(error)


def main(argv: list[str]) -> None:
    """Run the worker; ``argv`` is the socket's file descriptor and the parent's process id."""
    fd, parent_pid = map(int, argv)
    release_process(os.environ)
    if sys.platform == "linux":  # elsewhere an idle worker ends at the end of its connection
        die_with_parent()
        if os.getppid() != parent_pid:
            sys.exit("the parent ended before the reward worker had started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.set_inheritable(fd, False)  # programs which a reward function starts must not get it
    with Connection(fd) as connection:
        try:
            serve(connection)
        except EOFError:
            pass  # the pool is done
        except (BrokenPipeError, ConnectionResetError):
            sys.exit("the pool closed its end while this reward worker was busy")


if __name__ == "__main__":
    main(sys.argv[1:])
