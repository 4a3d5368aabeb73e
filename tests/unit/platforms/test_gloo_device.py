"""All gloo groups of a process have one network thread, on the interfaces that the user names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Makes four groups and tells how many threads serve them; a group must still reduce.
_SCRIPT = """
import time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from mindspeed_rl.platforms.gloo_device import share_devices

share_devices()
share_devices()
dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77)
)
groups = [dist.new_group([0]) for _ in range(3)]
for group in groups:
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    assert value.tolist() == [1, 1, 1]
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.ProcessGroupGloo)
first = dist.group.WORLD._get_backend(torch.device("cpu"))
assert first.options._timeout == timedelta(seconds=77)

def count():
    names = [f.read_text() for f in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_tcp" in name for name in names)

# a thread gives itself its name when it first runs
found, looks = -1, 0
while looks < 20:
    time.sleep(0.05)
    before, found = found, count()
    looks = looks + 1 if found == before else 0
print(found)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("env", "threads"),
    [({}, 1), pytest.param({"GLOO_SOCKET_IFNAME": "lo,lo"}, 2, marks=pytest.mark.slow)],
    ids=["shared", "one thread per named interface"],
)
def test_groups_share_a_thread(env: dict[str, str], threads: int) -> None:
    """Four groups: without the patch every one has its own."""
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=os.environ | env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert int(found.stdout) == threads
