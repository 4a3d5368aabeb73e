"""Temporary folders: gone after a kill, and never taken from a living process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindspeed_rl.core import owned_folders
from mindspeed_rl.core.owned_folders import claim, owned_folder, remove_mine, sweep

OWNER = """
import sys
from pathlib import Path
from mindspeed_rl.core.owned_folders import claim, owned_folder
launcher = Path(sys.argv[1])
claim(launcher)
with owned_folder("test") as folder:
    Path(folder, "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextmanager
def owner(launcher: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(launcher)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


BOTH = (owned_folders.PREFIX, owned_folders.LAUNCHER_PREFIX)


def test_folders_of_a_killed_process_are_swept_and_those_of_a_living_one_stay(root: Path) -> None:
    """Also torchrun's, which its ranks have marked; one that nobody marked stays."""
    launcher, foreign = root / "torchelastic_a", root / "torchelastic_b"
    (launcher / "none_x" / "attempt_0").mkdir(parents=True)
    foreign.mkdir()
    (root / "mindspeed_rl-unmarked").mkdir()
    with owner(launcher) as (process, folder):
        assert folder.parent == root and folder.stat().st_mode & 0o777 == 0o700
        assert sweep(BOTH) == [] and (folder / "file").is_file()
        process.kill()
        process.wait()
        assert sweep() == [folder] and launcher.is_dir()
        assert sweep(BOTH) == [launcher]
    assert {path.name for path in root.iterdir()} == {"torchelastic_b", "mindspeed_rl-unmarked"}


def test_folders_of_this_process_stay_until_it_removes_them(root: Path) -> None:
    launcher = root / "torchelastic_mine"
    launcher.mkdir()
    claim(launcher)
    with owned_folder("one") as first:
        with owned_folder("two") as second:
            assert sweep(BOTH) == []
        assert not Path(second).exists() and Path(first).is_dir()
        remove_mine()
        assert not Path(first).exists()
    assert [path.name for path in root.iterdir()] == ["torchelastic_mine"], "torchrun reads it"
