"""Temporary folders: gone after a kill, and never taken from a living process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindspeed_rl.core import owned_folders
from mindspeed_rl.core.owned_folders import (
    claim,
    kept_folder,
    new_key,
    owned_folder,
    remove_mine,
    segment_name,
    segments_of,
    sweep,
)

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


def test_a_link_of_a_stranger_takes_nothing_of_a_living_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leads to a folder whose owner is gone, under the key of a run that lives, or any key."""
    monkeypatch.setattr(owned_folders, "SHARED_MEMORY", str(root))
    gone = root / "gone"
    gone.mkdir()
    (gone / owned_folders.OWNER_FILE).touch()
    key = new_key()
    with owned_folder("engine", str(root), key):
        segment = root / segment_name(key, "x")
        segment.touch()
        (root / segment_name(key, "theirs")).mkdir()
        assert segments_of(key) == [segment], "a folder cannot be removed as a segment is"
        for name in (f"mindspeed_rl-a-{key}", "mindspeed_rl-a-*"):
            (root / name).symlink_to(gone)
        assert sweep() == [] and segment.exists()
        stars = root / "mindspeed_rl-dead-*"  # of this user, whose owner is gone
        gone.rename(stars)
        assert sweep() == [stars] and segment.exists()


KEEPER = """
import os
import sys
from pathlib import Path
from mindspeed_rl.core import owned_folders
owned_folders.SHARED_MEMORY = sys.argv[1]
folder = Path(owned_folders.kept_folder("engine", sys.argv[1], sys.argv[2]))
Path(sys.argv[1], "sem." + owned_folders.segment_name(sys.argv[2], "x")).write_bytes(b"x")
if not os.fork():
    sys.exit()  # runs what is registered for the end of a process
os.wait()
print(folder.is_dir(), flush=True)
sys.stdin.read()
"""


def test_segments_go_with_the_folder_of_their_owner(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living job's stay, however old they are; those without an owner stay for an hour."""
    monkeypatch.setattr(owned_folders, "SHARED_MEMORY", str(root))
    mine, theirs = new_key(), new_key()
    kept = Path(kept_folder("engine", str(root), mine))
    segments = {
        name: root / segment_name(key, name)
        for name, key in (("mine", mine), ("old", new_key()), ("new", new_key()))
    }
    segments |= {"foreign": root / "psm_12345678", "other": root / segment_name(new_key(), "user")}
    segments |= {name: root / f".mindspeed_rl-new-{name}" for name in ("hidden", "hidden-new")}
    for name, path in segments.items():
        path.mkdir() if name.startswith("hidden") else path.write_bytes(b"")
    for name in ("mine", "old", "foreign", "hidden", "other"):
        os.utime(segments[name], (1, 1))
    if os.getuid() == 0:
        os.chown(segments["other"], 65534, -1)
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(root), theirs],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n", "a forked process removes nothing"
        assert len(segments_of(theirs)) == 1
        swept = {segments["old"], segments["hidden"]}
        others = {segments["other"]} if os.getuid() else set()
        assert set(sweep()) == swept | others
        process.kill()
        process.wait()
        assert sweep() == [root / f"mindspeed_rl-engine-{theirs}"]
    assert segments_of(theirs) == []
    left = {name for name, path in segments.items() if path.exists()} - {"other"}
    assert left == {"mine", "new", "foreign", "hidden-new"} and kept.is_dir()
    remove_mine()
    assert not kept.exists()
