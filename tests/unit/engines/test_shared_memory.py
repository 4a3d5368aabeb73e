"""Shared memory of CPU engines: room for it, and what killed runs left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.layout_cases import GQA, spec_of

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core import owned_folders, shared_memory
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm import host_backend
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.vllm_patches import shared_memory_names

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory_names, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_too_little_room_is_refused_with_both_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, fits in ((90 * MIB, True), (69 * MIB, False)):
        disk: Any = lambda path, free=free: SimpleNamespace(free=free)  # noqa: E731
        monkeypatch.setattr(shared_memory.shutil, "disk_usage", disk)
        if fits:
            shared_memory.check_shared_memory(4, 2)
        else:
            with pytest.raises(UsageError, match=r"--rollout-tp 2: .*need 70 MiB.*69 MiB are free"):
                shared_memory.check_shared_memory(4, 2)


class PatchedError(Exception):
    """The build went on to the first patch of vLLM."""


@pytest.mark.parametrize(
    ("tp", "local_rank", "looks"), [(2, 0, True), (2, 1, False), (1, 0, False)]
)
def test_the_first_rank_of_a_node_looks_before_any_rank_builds(
    tp: int, local_rank: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For engines of several ranks, which would be killed by SIGBUS where there is no room."""

    def applied() -> None:
        raise PatchedError

    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(host_backend, "check_model_support", lambda *_: None)
    monkeypatch.setattr(host_backend.plain_linear, "apply", applied)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    layout = VllmLayout(spec_of(GQA), EngineLayout(4 // tp, tp))
    settings = EngineSettings("unused", layout, 0, "float32", 16, 1, 0, {}, EngineTuningConfig())
    backend = host_backend.HostBackend(settings, CpuPlatform())
    if looks:
        with pytest.raises(UsageError, match=r"--rollout-tp 2: .*need 70 MiB of it, 1 MiB are"):
            backend.prepare()
    else:
        with pytest.raises(PatchedError):
            backend.prepare()


OWNER = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from mindspeed_rl.vllm_patches import shared_memory_names
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
shared_memory_names.own()
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
queue = MessageQueue(1, 1, [0])
print(shared_memory_names._KEYS[0], flush=True)
sys.stdin.read()
"""


@contextmanager
def engine_process(store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with one of vLLM's queues, in a process group of its own, which says its key."""
    variables = {k: v for k, v in os.environ.items() if k != shared_memory_names.SOCKETS}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(store)], env=variables, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def kinds_of(key: str) -> set[str]:
    """What there is of a job: its folder, sockets in it, and a queue."""
    found = {path.name.split(key)[1][:5] for path in owned_folders.segments_of(key)}
    folder = Path(owned_folders.SHARED_MEMORY, f"mindspeed_rl-engine-{key}")
    if folder.is_dir():
        assert folder.stat().st_mode & 0o777 == 0o700
        found |= {"folder"} | {"socket" for path in folder.iterdir() if path.is_socket()}
    return found


def test_what_a_queue_of_vllm_leaves_is_swept_when_its_process_is_killed(tmp_path: Path) -> None:
    """kill -9 of the process and of Python's tracker; nothing goes while the process lives."""
    everything = {"folder", "socket", "-psm_"}
    with engine_process(tmp_path / "store") as process:
        assert process.stdout is not None
        key = process.stdout.readline().strip()
        owned_folders.sweep()
        assert kinds_of(key) == everything
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert kinds_of(key) == everything, "what there is to sweep"
    owned_folders.sweep()
    assert kinds_of(key) == set()
