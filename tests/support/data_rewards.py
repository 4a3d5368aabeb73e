"""Reward functions as a user writes them, well-behaved and not; loaded by path, in workers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mindspeed_rl.rewards import RewardRequest

NOT_IN_A_WORKER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LD_PRELOAD"
)  # fmt: skip


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


def leaves_much_behind(request: RewardRequest) -> float:
    """A program and a folder, which it names in the file of the answer."""
    program = subprocess.Popen(["sleep", "60"])
    part = Path(f"{request.answer}.part")
    part.write_text(f"{program.pid} {tempfile.mkdtemp()}")
    part.replace(request.answer)
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
    assert not [name for name in NOT_IN_A_WORKER if name in os.environ], os.environ
    assert "KEPT" in os.environ and os.environ["OMP_NUM_THREADS"] == "1"
    assert "torch" not in sys.modules
    return float(os.getpid())


def returns(request: RewardRequest) -> object:
    return request.metadata["value"]
