"""What an entry sets before and after it knows its platform."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_rl.core import owned_folders
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch import bootstrap

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


@pytest.fixture
def nothing_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    for name in ("torch", "torch_npu", "vllm", "megatron.core"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize(
    ("platform", "asked", "expected"),
    [
        ("npu", True, ["strict", "1", "1"]),
        ("npu", False, ["false", None, None]),
        ("cpu", True, ["false", None, None]),
    ],
)
def test_determinism_is_in_the_environment_before_torch(
    platform: str, asked: bool, expected: list[str | None]
) -> None:
    """Libraries read it when they are loaded; a user's weaker value is replaced and told."""
    environ = {"HCCL_DETERMINISTIC": "false"}
    notes = bootstrap.prepare_environment(platform, environ, deterministic=asked)
    names = ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT")
    assert [environ.get(name) for name in names] == expected
    replaced = ["HCCL_DETERMINISTIC=false: --npu-deterministic sets strict"]
    assert notes == (replaced if expected[0] == "strict" else [])


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize(("platform", "size", "expected"), [
    ("npu", 240, "240"), ("npu", 0, None), ("cpu", 240, None),
])  # fmt: skip
def test_the_size_of_hccls_buffers_is_set_before_it_is_loaded(
    platform: str, size: int, expected: str | None
) -> None:
    environ: dict[str, str] = {}
    notes = bootstrap.prepare_environment(platform, environ, buffer_mb=size)
    assert environ.get("HCCL_BUFFSIZE") == expected
    assert any("HCCL_BUFFSIZE=240" in note for note in notes) == (expected is not None)


@pytest.mark.parametrize(
    ("platform", "rank", "expected"),
    [("npu", "0", "WARNING"), ("npu", "3", "ERROR"), ("cpu", "0", "ERROR")],
)
def test_one_rank_shows_what_vllm_ascend_ignores(platform: str, rank: str, expected: str) -> None:
    environ = {"RANK": rank}
    bootstrap.set_defaults(platform, environ)
    assert environ["VLLM_LOGGING_LEVEL"] == expected
    mine = {"RANK": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    bootstrap.set_defaults(platform, mine)
    assert mine["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.usefixtures("nothing_imported")
def test_what_the_engine_reads_of_a_users_environment() -> None:
    """vLLM's cache of what models are stays where it is; its size of the cache is a flag of ours.

    With the variable vLLM on CPU would silently take whole GiB instead of --rollout-kv-cache-gb.
    """
    kept = {"VLLM_CACHE_ROOT": "/mine", "XDG_CACHE_HOME": "/home/cache", "OMP_NUM_THREADS": "3"}
    environ = kept | {"VLLM_CPU_KVCACHE_SPACE": "4"}
    bootstrap.prepare_environment("cpu", environ)
    assert environ.items() >= kept.items() and "VLLM_CPU_KVCACHE_SPACE" not in environ


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize("name", ["torch", "torch_npu", "vllm", "megatron.core"])
def test_what_reads_the_environment_is_imported_after_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(RuntimeError, match=f"{name} was imported before"):
        bootstrap.prepare_environment("npu", {})


def test_hccl_waits_as_long_as_a_phase_may_take() -> None:
    """Else it would end a collective of a rank that is still at work; the user's value stays."""
    for platform, seconds, found in (
        ("npu", 5400.2, "5401"),
        ("npu", 60.0, "3600"),
        ("cpu", 5400.2, None),
    ):
        environ: dict[str, str] = {}
        bootstrap.set_defaults(platform, environ, seconds)
        assert environ.get("HCCL_EXEC_TIMEOUT") == found
    own = {"HCCL_EXEC_TIMEOUT": "60"}
    bootstrap.set_defaults("npu", own, 5400.2)
    assert own["HCCL_EXEC_TIMEOUT"] == "60", "the doctor has a row for it"


def test_a_process_without_a_launcher_is_the_only_rank() -> None:
    environ = {"HOME": "/home/me"}
    bootstrap.join_launcher("mindspeed_rl.train_rl", environ)
    port = int(environ.pop("MASTER_PORT"))
    assert 1024 <= port < 65536
    assert environ == {
        "HOME": "/home/me", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip


def test_a_launcher_sets_all_variables_or_none() -> None:
    launched = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "6000"}
    environ = dict(launched)
    bootstrap.join_launcher("mindspeed_rl.train_rl", environ)
    assert environ == launched
    del environ["MASTER_PORT"]
    with pytest.raises(UsageError, match=r"MASTER_PORT not set.*torchrun --nproc-per-node"):
        bootstrap.join_launcher("mindspeed_rl.train_rl", environ)
    assert "MASTER_PORT" not in environ


# -- temporary folders -----------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files with what a killed rank left, torchrun's among it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(owned_folders, "SHARED_MEMORY", str(tmp_path))
    for name in ("mindspeed_rl-reward-1", "torchelastic_old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / owned_folders.OWNER_FILE).touch()
    return tmp_path


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_start_removes_what_was_left_and_marks_its_own_folder_of_torchrun(
    temporary: Path, local_rank: int
) -> None:
    """The first rank of a node does."""
    error_file = temporary / "torchelastic_mine" / "none_x" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    world = bootstrap.World(2 + local_rank, 4, local_rank, 2)
    bootstrap.tidy_temporary_folders(world, {"TORCHELASTIC_ERROR_FILE": str(error_file)})
    left = {path.name for path in temporary.iterdir()}
    marked = (temporary / "torchelastic_mine" / owned_folders.OWNER_FILE).is_file()
    if local_rank:
        assert left == {"mindspeed_rl-reward-1", "torchelastic_old", "torchelastic_mine"}
        assert not marked
    else:
        assert left == {"torchelastic_mine"} and marked


def test_a_refused_start_leaves_no_folder_of_torchrun_for_good(temporary: Path) -> None:
    """torchrun still reads what its rank wrote; the next start of any run removes the folder."""
    error_file = temporary / "torchelastic_mine" / "none_x" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    variables = {
        "TORCHELASTIC_ERROR_FILE": str(error_file), "TMPDIR": str(temporary), "RANK": "0",
        "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }  # fmt: skip
    refused = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.train_rl", "--no-such-flag"],
        capture_output=True, text=True, check=False, env=os.environ | variables, cwd=ROOT,
    )  # fmt: skip
    assert refused.returncode == 2, refused.stderr
    assert "--no-such-flag" in error_file.read_text()
    assert [path.name for path in temporary.iterdir()] == ["torchelastic_mine"]
    assert owned_folders.sweep((owned_folders.LAUNCHER_PREFIX,)) == [
        temporary / "torchelastic_mine"
    ]
