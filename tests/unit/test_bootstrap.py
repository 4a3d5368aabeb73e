"""What an entry sets before and after it knows its platform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
from mindspeed_rl import bootstrap

asked, found = sys.argv[1:]
changed = bootstrap.prepare_environment(asked, os.environ)
assert [c.partition("=")[0] for c in changed] == ["PYTORCH_CUDA_ALLOC_CONF"] * (asked != "cpu")
assert ("PYTORCH_CUDA_ALLOC_CONF" in os.environ) == (asked == "cpu"), "R17: before torch reads it"
before = os.environ.get("TORCH_COMPILE_DISABLE")
from mindspeed_rl.platforms import registry
from mindspeed_rl.platforms.cpu import CpuPlatform

class Found(CpuPlatform):
    name = found

registry.select_platform = lambda name: Found()
bootstrap.start(asked, 1, bootstrap.World.from_environment())
import torch._dynamo.config
print(before, torch._dynamo.config.disable)
"""


@pytest.mark.parametrize(
    ("asked", "found", "printed"),
    [("auto", "cpu", "None True"), ("auto", "cuda", "None False"), ("cpu", "cpu", "1 True")],
)
def test_only_a_cpu_goes_without_torch_compile(asked: str, found: str, printed: str) -> None:
    """With ``--platform auto`` it is decided when the platform is known, before it is too late."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_COMPILE_DISABLE"} | {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "MINDSPEED_RL_ALLOW_VERSIONS": "1", "PYTHONPATH": str(ROOT),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, asked, found],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == printed
