"""The user's own files and environments, looked at before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_rl.config.environment import BUILT_IN_ENVIRONMENTS
from mindspeed_rl.config.reward_spec import check_name
from mindspeed_rl.config.rewards import RewardConfig, check_rewards
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.environments import resolve_environment

MINE = """
import math as maths
from os import path

class Mine: ...

def build(tokenizer): ...

other = build
if path:
    later = maths
"""


def check_environment(name: str, *, files: bool = True) -> None:
    check_name("--rl-environment", name, BUILT_IN_ENVIRONMENTS, files=files)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_environments_that_are_checked_are_those_that_are_found() -> None:
    assert all(callable(resolve_environment(name)) for name in BUILT_IN_ENVIRONMENTS)


@pytest.mark.parametrize("name", ["Mine", "build", "other", "later", "maths", "path"])
def test_whatever_a_file_binds_is_accepted_and_then_found(mine: Path, name: str) -> None:
    """The early check refuses nothing that the import would find."""
    check_environment(f"{mine}:{name}")
    check_rewards(RewardConfig(reward_function=(f"{mine}:{name}",)), 60.0, "")
    if name not in ("later", "maths", "path"):  # modules cannot be called
        assert callable(resolve_environment(f"{mine}:{name}"))


@pytest.mark.parametrize(
    "text",
    ["from os.path import *\n", "globals()['X'] = len\n", "exec('X = len')\n",
     "locals()['X'] = len\n", "import sys\nsys.modules[__name__].__dict__['X'] = len\n",
     "def __getattr__(name): return len\n"],
)  # fmt: skip
def test_names_that_cannot_be_read_are_left_to_the_import(tmp_path: Path, text: str) -> None:
    file = tmp_path / "any.py"
    file.write_text(text)
    check_environment(f"{file}:X")
    if "len" in text:
        assert resolve_environment(f"{file}:X") is len, "the import finds it"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("calculater", "calculator"),
        ("/no/file.py:X", "/no/file.py"),
        ("{mine}:Mime", "Mine"),
        ("{mine}:zzz", "zzz"),
        ("{broken}:X", "syntax"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_loaded(
    mine: Path, tmp_path: Path, name: str, near: str
) -> None:
    """With the nearest name; of an environment and of a reward alike."""
    broken = tmp_path / "broken.py"
    broken.write_text("class X:\n    def\n")
    text = name.format(mine=mine, broken=broken)
    with pytest.raises(UsageError, match=f"--rl-environment {re.escape(text)}.*{near}"):
        check_environment(text)
    if ":" in text:
        with pytest.raises(UsageError, match=f"--reward-function {re.escape(text)}.*{near}"):
            check_rewards(RewardConfig(reward_function=(f"{text}=0.5",)), 60.0, "")


def test_a_dry_run_needs_no_files_and_knows_the_names() -> None:
    check_environment("/no/file.py:X", files=False)
    with pytest.raises(UsageError, match="--rl-environment nothing"):
        check_environment("nothing", files=False)
