"""The emulator's build clones MindSpeed where it is asked to, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ascend.emulator import build

from mindspeed_rl.core.versions import mindspeed_branch

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.com")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the branch that is needed, and another at its head."""
    folder = tmp_path / "repository"
    for command in (
        ("init", "-q", "-b", mindspeed_branch(), str(folder)),
        ("-C", str(folder), "commit", "-q", "--allow-empty", "-m", "needed"),
        ("-C", str(folder), "switch", "-q", "-c", "master"),
        ("-C", str(folder), "commit", "-q", "--allow-empty", "-m", "another"),
    ):
        subprocess.run([*GIT, *command], check=True)
    return folder


def subject(checkout: str) -> str:
    command = ["git", "-C", checkout, "log", "-1", "--format=%s"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cache: Path,
    variables: Mapping[str, str],
    *options: str,
) -> dict[str, str]:
    """What the build exports, without wheels and compilers."""
    monkeypatch.setattr(build, "build", lambda folder: folder.mkdir(exist_ok=True))
    for name in ("MINDSPEED_SOURCE", "MINDSPEED_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MINDSPEED_RL_ASCEND_CACHE": str(cache), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["build.py", *options])
    build.main()
    lines = capsys.readouterr().out.splitlines()
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_mindspeed_is_cloned_by_one_variable_or_option(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its branch of the matrix; once."""
    cache, source = tmp_path / "cache", str(repository)
    first = printed(monkeypatch, capsys, cache, {"MINDSPEED_SOURCE": source})["MINDSPEED_PATH"]
    assert subject(first) == "needed" and Path(first).is_relative_to(cache)
    (Path(first) / "kept").touch()
    again = printed(monkeypatch, capsys, cache, {}, "--mindspeed", source)["MINDSPEED_PATH"]
    assert again == first and (Path(again) / "kept").exists()


def test_a_checkout_that_is_named_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source, which cannot be cloned, is not asked; nor is any without the variable."""
    for given in ({"MINDSPEED_SOURCE": "/nowhere", "MINDSPEED_PATH": "/mine"}, {}):
        found = printed(monkeypatch, capsys, tmp_path / "cache", given)
        assert "MINDSPEED_PATH" not in found and "PYTHONPATH" in found


def test_a_clone_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(subprocess.CalledProcessError):
        printed(monkeypatch, capsys, cache, {"MINDSPEED_SOURCE": str(tmp_path / "none")})
    assert not list(cache.glob("mindspeed*"))
