"""The reward worker: ``python -m mindspeed_rl.rewards.worker FD PARENT_PID``, started by the pool.

A process of its own, with its own main thread, so that libraries which need signals work
and a stuck function can be killed. Imports nothing that the reward functions do not need.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import sys
from collections import deque

from mindspeed_rl.rewards import wire
from mindspeed_rl.rewards.registry import warm_up_reward
from mindspeed_rl.rewards.scoring import WeightedReward, is_scored_by, score_sample
from mindspeed_rl.rewards.types import RewardRequest, RewardResult
from mindspeed_rl.rewards.worker_process import Ready, WorkerSetup

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent ends, however it ends (Linux)."""
    if sys.platform != "linux":
        return  # elsewhere an idle worker still ends at the end of its socket
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before the reward worker had started")


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


def _load(setup: WorkerSetup) -> list[WeightedReward]:
    rewards = [WeightedReward.from_spec(spec, setup.settings) for spec in setup.specs]
    for spec in setup.specs:
        warm_up_reward(spec)
    return rewards


class _Desk:
    """The samples that have arrived and are not scored, and the functions that score them."""

    def __init__(self, rewards: list[WeightedReward], row_key: str) -> None:
        self._rewards = rewards
        self._weights = {r.label: r.weight for r in rewards}
        self._row_key = row_key
        self.waiting: deque[RewardRequest] = deque()

    def take(self, requests: list[RewardRequest]) -> None:
        """Further samples. Rewards that wait for others begin with all of them at once."""
        self.waiting.extend(requests)
        for reward in self._rewards:
            begin = getattr(reward.function, "prefetch", None)
            if begin is not None:
                begin([r for r in requests if self._scores(reward, r)])

    def _scores(self, reward: WeightedReward, request: RewardRequest) -> bool:
        return is_scored_by(reward.label, self._weights, request, self._row_key)

    def score_next(self, connection: socket.socket) -> bool:
        """Send one result; return whether this worker can go on."""
        request = self.waiting.popleft()
        try:
            result = score_sample(self._rewards, request, self._row_key)
        except MemoryError:
            detail = "MemoryError: the reward function ran into the worker's memory limit"
            result = RewardResult(request.sample_id, None, {}, "error", detail)
            # What filled the memory may live on in caches and globals: start afresh.
            connection.sendall(wire.encode(wire.Kind.LAST_RESULT, result))
            return False
        connection.sendall(wire.encode(wire.Kind.RESULT, result))
        return True


def serve(connection: socket.socket) -> None:
    """Load the functions, then score until the parent closes its end."""
    message = wire.receive(connection)
    if message is None:
        return
    setup: WorkerSetup = message.payload
    try:
        rewards = _load(setup)
    except ValueError as error:
        connection.sendall(wire.encode(wire.Kind.BAD_REWARD, str(error)))
        return
    if setup.memory_limit_bytes is not None:
        limit_memory(setup.memory_limit_bytes)
    functions = [reward.function for reward in rewards]
    notices = [getattr(function, "notice", "") for function in functions]
    at_once = max(getattr(function, "concurrency", 1) for function in functions)
    ready = Ready(tuple(filter(None, notices)), at_once)
    connection.sendall(wire.encode(wire.Kind.READY, ready))
    desk = _Desk(rewards, setup.settings.row_key)
    while True:
        while not desk.waiting or select.select([connection], [], [], 0.0)[0]:
            message = wire.receive(connection)
            if message is None:
                return
            desk.take(message.payload)
        if not desk.score_next(connection):
            return


def main(argv: list[str]) -> None:
    """Entry: ``argv`` is the socket's file descriptor and the parent's process id."""
    fd, parent_pid = map(int, argv)
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.set_inheritable(fd, False)  # not for programs which a reward function starts
    with socket.socket(fileno=fd) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError):
            sys.exit("the pool closed its end while this reward worker was busy")


if __name__ == "__main__":
    main(sys.argv[1:])
