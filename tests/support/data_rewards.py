"""Reward functions as a user writes them, well-behaved and not; loaded by path, in workers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time

from mindspeed_rl.rewards import RewardRequest


def length(request: RewardRequest) -> float:
    return float(len(request.response))


def raises_on_bad(request: RewardRequest) -> float:
    if "bad" in request.response:
        raise RuntimeError("cannot score " + request.response)
    return 1.0


def hangs_on_bad(request: RewardRequest) -> float:
    while "bad" in request.response:
        pass
    return 1.0


def hangs_in_c_on_bad(request: RewardRequest) -> float:
    if "bad" in request.response:
        re.match("(a+)+$", "a" * 64 + "b")
    return 1.0


def starts_a_program(request: RewardRequest) -> float:
    program = subprocess.Popen(["sleep", "60"])
    with open(request.answer, "w") as file:
        file.write(str(program.pid))
    program.wait()
    return 1.0


def allocates_on_bad(request: RewardRequest) -> float:
    if "bad" in request.response:
        return float(len(bytearray(10 << 30)))
    return float(os.getpid())


def dies_on_bad(request: RewardRequest) -> float:
    if "bad" in request.response:
        os._exit(3)
    return 1.0


def several_at_a_time(request: RewardRequest) -> float:
    """As a reward that waits for a server: its worker holds several samples."""
    return dies_on_bad(request)


several_at_a_time.concurrency = 4  # type: ignore[attr-defined]


def leaves_files_behind(request: RewardRequest) -> float:
    folder = tempfile.mkdtemp()
    with open(request.answer, "w") as file:
        file.write(folder)
    while "bad" in request.response:
        pass
    return 1.0


def segfaults_on_bad(request: RewardRequest) -> float:
    if "bad" in request.response:
        ctypes.string_at(0)
    return 1.0


def sleeps(request: RewardRequest) -> float:
    time.sleep(float(request.response))
    return 1.0


def process(request: RewardRequest) -> float:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LD_PRELOAD")
    assert not [name for name in names if name in os.environ], os.environ
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "torch" not in sys.modules
    return float(os.getpid())


def returns(request: RewardRequest) -> object:
    return request.metadata["value"]
