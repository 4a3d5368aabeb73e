"""What an entry sets before and after it knows its platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import os, sys
from mindspeed_rl.launch import bootstrap

asked, found = sys.argv[1:]
changed = bootstrap.prepare_environment(asked, os.environ)
assert [c.partition("=")[0] for c in changed] == ["PYTORCH_CUDA_ALLOC_CONF"] * (asked != "cpu")
assert ("PYTORCH_CUDA_ALLOC_CONF" in os.environ) == (asked == "cpu"), "before torch reads it"
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
    [
        ("auto", "cpu", "None True"),
        pytest.param("auto", "cuda", "None False", marks=pytest.mark.slow),
        pytest.param("cpu", "cpu", "1 True", marks=pytest.mark.slow),
    ],
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


PREPARE = """
import json, sys
from mindspeed_rl.launch import bootstrap
environ = {"HCCL_DETERMINISTIC": "false"}
told = bootstrap.prepare_environment(sys.argv[1], environ, deterministic=sys.argv[2] == "yes")
assert "torch" not in sys.modules and "torch_npu" not in sys.modules
names = ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT")
print(json.dumps([told, [environ.get(name) for name in names]]))
"""


@pytest.mark.parametrize(
    ("platform", "asked", "expected"),
    [
        ("npu", "yes", ["strict", "1", "1"]),
        ("npu", "no", ["false", None, None]),
        ("cpu", "yes", ["false", None, None]),
    ],
)
def test_determinism_is_in_the_environment_before_torch(
    platform: str, asked: str, expected: list[str | None]
) -> None:
    """Libraries read it when they are loaded; a user's weaker value is replaced and told."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, platform, asked],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, found = json.loads(done.stdout)
    assert found == expected
    replaced = ["HCCL_DETERMINISTIC=false: --npu-deterministic sets strict"]
    assert told == (replaced if expected[0] == "strict" else [])


ENGINE = """
import json
from mindspeed_rl.launch import bootstrap
kept = {"VLLM_CACHE_ROOT": "/mine", "XDG_CACHE_HOME": "/home/cache", "OMP_NUM_THREADS": "3"}
environ = kept | {"VLLM_CPU_KVCACHE_SPACE": "4"}
bootstrap.prepare_environment("cpu", environ)
found = {name: environ[name] for name in kept}
print(json.dumps([found == kept, "VLLM_CPU_KVCACHE_SPACE" in environ]))
"""


def test_what_the_engine_reads_of_a_users_environment() -> None:
    """vLLM's cache of what models are stays where it is; its size of the cache is a flag of ours.

    With the variable vLLM on CPU would silently take whole GiB instead of --rollout-kv-cache-gb.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, False]


LATE = """
import importlib, sys
importlib.import_module(sys.argv[1])
from mindspeed_rl.launch import bootstrap
bootstrap.prepare_environment("npu", {})
"""


@pytest.mark.parametrize("name", ["torch", "torch_npu", "vllm", "megatron.core"])
def test_what_reads_the_environment_is_imported_after_it(name: str, tmp_path: Path) -> None:
    """Empty packages in their place, in a process of its own."""
    folder = tmp_path
    for part in name.split("."):
        folder /= part
        folder.mkdir()
        (folder / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", LATE, name], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode and f"bootstrap: {name} was imported before" in done.stderr
