"""The examples of docs/extending.md, executed; test_adding_a_family.py runs that of a family."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import build_tokenizer
from support.architecture import ROOT
from support.pages import python_files

from mindspeed_rl.config.diagnostics import TrackerConfig, check_trackers
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments import LocalRunner, Observation, resolve_environment
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.trackers import make_trackers
from mindspeed_rl.rewards import RewardRequest, RewardSpec, WeightedReward, score_sample

FILES = python_files("extending.md")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a reader who copied the files of the page."""
    (tmp_path / "my").mkdir()
    for name, text in FILES.items():
        if name.startswith("my/"):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def request(**changed: Any) -> RewardRequest:
    fields: dict[str, Any] = {
        "sample_id": 0,
        "prompt": "Which?",
        "response": "an apple and a pear",
        "answer": "apple",
        "finish_reason": "stop",
        "num_response_tokens": 5,
        "metadata": {"keywords": ["apple", "plum"]},
    }
    return RewardRequest(**{**fields, **changed})


def test_rewards(reader: Path) -> None:
    rewards = [
        WeightedReward.from_spec(RewardSpec.parse(f"my/rewards.py:{name}"))
        for name in ("brevity=0.1", "mentions=0.2")
    ]
    found = score_sample(rewards, request())
    assert found.parts == {"brevity": 1.0, "mentions": 0.5}
    assert found.reward == pytest.approx(0.1 + 0.2 * 0.5)
    assert score_sample(rewards, request(num_response_tokens=200)).parts["brevity"] == 0.0
    assert score_sample(rewards, request(response="")).parts == {"mentions": 0.0}
    printed = StringIO()
    with redirect_stdout(printed):
        exec(FILES["my/try_reward.py"], {})
    assert "reward=1.0" in printed.getvalue()


def test_environment(reader: Path) -> None:
    tokenizer = build_tokenizer(["Try again."] * 3, 262)
    runner = LocalRunner(resolve_environment("my/riddle.py:Riddle"), tokenizer, 0)
    runner.reset({0: Prompt(0, (1,), "Which?", "42")})
    assert runner.answers(0.0) == {0: Observation()}
    answers = []
    for text in ("41", "It is 42"):
        runner.step({0: tuple(tokenizer(text)["input_ids"])})
        answers.append(runner.answers(0.0)[0])
    assert isinstance(answers[0], Observation) and isinstance(answers[1], Observation)
    assert "Try again." in tokenizer.decode(list(answers[0].token_ids))
    assert (answers[0].done, answers[0].reward) == (False, 0.0)
    assert answers[1] == Observation(done=True, reward=1.0)


@pytest.fixture(scope="module")
def with_algorithms() -> dict[str, Any]:
    """What the estimator and the loss of the page give, in a process that has them."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/extended_run.py")],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / n) for n in ("", "tests"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_estimator(with_algorithms: dict[str, Any]) -> None:
    """Groups of rewards 1, 0, 5 and 2, none, 2: of the function, and in a step of a run."""
    assert with_algorithms["of_samples"] == [[0.0, -1.0, 4.0], [0.0, 0.0, 0.0]]
    assert with_algorithms["of_the_step"] == {
        str(i): [a] for i, a in enumerate((0, -1, 4, 0, 0, 0))
    }


def test_policy_loss(with_algorithms: dict[str, Any]) -> None:
    """Value and gradient by hand, for the ratios and advantages of the script."""
    eps, pairs = (
        with_algorithms["eps"],
        list(zip(with_algorithms["ratios"], with_algorithms["advantages"], strict=True)),
    )
    value = sum(-(r * a - abs(a) * (r - 1) ** 2 / (2 * eps)) for r, a in pairs)
    assert with_algorithms["loss"] == pytest.approx(value)
    by_hand = [-r * (a - abs(a) * (r - 1) / eps) for r, a in pairs]
    assert with_algorithms["gradient"] == pytest.approx(by_hand)
    assert with_algorithms["clip_fraction"] == pytest.approx(2 / 3)
    assert with_algorithms["updates"] == 1


@pytest.mark.parametrize("name", ["my/csv_tracker.py", "csv_tracker"])
def test_tracker(reader: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The logger of the page behind that of a run, which is stopped and resumed."""
    monkeypatch.syspath_prepend(str(reader / "my"))
    monkeypatch.delitem(sys.modules, "csv_tracker", raising=False)
    config = TrackerConfig(tracker=(name,))
    check_trackers(config)

    def logger() -> RunLogger:
        return RunLogger(reader / "run", True, make_trackers(config, reader / "run", {}))

    with closing(logger()) as first:
        for step in (1, 2, 3):
            first.log(step, {"reward/mean": step / 2, "loss": math.nan})
    with closing(logger()) as resumed:
        resumed.truncate_after(2)
        resumed.log(3, {"reward/mean": 9.0})

    def rows(name: str) -> list[list[str]]:
        with (reader / "run" / "csv" / name).open(newline="") as file:
            return list(csv.reader(file))

    assert rows("run.csv") == [[str(s), "reward/mean", str(s / 2)] for s in (1, 2, 3)]
    assert rows("run from step 2.csv") == [["2", "reward/mean", "1.0"], ["3", "reward/mean", "9.0"]]
