"""Shared memory of CPU engines: room for it, and what killed runs left of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.vllm.patches import shared_memory_names

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
        monkeypatch.setattr(shared_memory_names.shutil, "disk_usage", disk)
        if fits:
            shared_memory_names.check_space(4, 2)
        else:
            with pytest.raises(UsageError, match=r"--rollout-tp 2: .*need 70 MiB.*69 MiB are free"):
                shared_memory_names.check_space(4, 2)


def test_only_old_segments_of_this_user_are_swept(folder: Path) -> None:
    names = ["old", "new", "other", "foreign"]
    paths = {name: folder / f"mindspeed_rl-{name}-cpushm_0" for name in names[:3]}
    paths["foreign"] = folder / "sem.x"
    for path in paths.values():
        path.write_bytes(b"")
    for name in ("old", "other", "foreign"):
        os.utime(paths[name], (1, 1))
    if os.getuid() == 0:
        os.chown(paths["other"], 65534, -1)
    shared_memory_names.sweep()
    kept = {name for name, path in paths.items() if path.exists()}
    assert kept - {"other"} == {"new", "foreign"}
    assert "other" in kept or os.getuid() != 0
