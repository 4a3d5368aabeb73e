"""Weights & Biases and SwanLab: what reaches them, and what a missing package says.

The packages are replaced by a module of the same calls; the real ones were run by hand.
"""

from __future__ import annotations

import math
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig, TrackerConfig, diagnostics
from mindspeed_rl.config.diagnostics import check_trackers
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.trackers import make_trackers

BOTH = TrackerConfig(wandb_project="rl", swanlab_project="rl", wandb_entity="team")


class Run:
    """What ``init`` gives: steps may not go back, as in both packages."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.finished and (not self.logged or step >= self.logged[-1][0])
        assert all(math.isfinite(v) for v in values.values())
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Run]]:
    """Runs by package."""
    found: dict[str, list[Run]] = {"wandb": [], "swanlab": []}
    for name, several in found.items():

        def init(several: list[Run] = several, **arguments: Any) -> Run:
            several.append(Run(arguments))
            return several[-1]

        module = ModuleType(name)
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_every_metric_reaches_both_once_also_after_a_resume(
    runs: dict[str, list[Run]], tmp_path: Path
) -> None:
    output = tmp_path / "seed0"
    others = make_trackers(BOTH, output, {"train": {"lr": 1e-6}})
    with closing(RunLogger(output, True, others)) as logger:
        logger.log(0, {"eval/accuracy": 0.1})
        for step in (1, 2, 3):
            logger.log(step, {"reward/mean": float(step), "loss": math.nan})
    again = make_trackers(BOTH, output, {})
    with closing(RunLogger(output, True, again)) as logger:
        logger.truncate_after(2)
        logger.log(3, {"reward/mean": 30.0})
    for several in runs.values():
        first, second = several
        assert first.finished and second.finished
        assert first.logged == [
            (0, {"eval/accuracy": 0.1}), *((s, {"reward/mean": float(s)}) for s in (1, 2, 3)),
        ]  # fmt: skip
        assert second.logged == [(2, {"reward/mean": 2.0}), (3, {"reward/mean": 30.0})]
        assert first.arguments["name"] == first.arguments["group"] == "seed0"
        assert second.arguments["name"] == "seed0 from step 2"
        assert second.arguments["group"] == "seed0"
        assert first.arguments["config"] == {"train": {"lr": 1e-6}}
    assert runs["wandb"][0].arguments["entity"] == "team"
    assert runs["wandb"][0].arguments["dir"] == str(output)
    assert runs["swanlab"][0].arguments["log_dir"] == str(output / "swanlog")


def test_a_run_that_logs_nothing_makes_no_run(runs: dict[str, list[Run]], tmp_path: Path) -> None:
    others = make_trackers(replace(BOTH, wandb_exp_name="mine"), tmp_path, {})
    with closing(RunLogger(tmp_path / "a", True, others)):
        pass
    with closing(RunLogger(tmp_path / "b", False, others)) as logger:
        logger.log(1, {"reward/mean": 1.0})
    assert runs == {"wandb": [], "swanlab": []}
    assert make_trackers(TrackerConfig(), tmp_path, {}) == []


@pytest.mark.parametrize("package", ["wandb", "swanlab"])
def test_a_package_that_is_missing_is_told_before_the_run(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [f"--{package}-project", "rl", "--hf-checkpoint", "x"]
    trackers = parse(RLRunConfig, argv, "test").config.trackers
    monkeypatch.setattr(diagnostics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--{package}-project rl "):
        check_trackers(trackers)
    check_trackers(TrackerConfig())
    monkeypatch.setattr(diagnostics, "find_spec", lambda name: name == package or None)
    check_trackers(trackers)


@pytest.mark.parametrize("name", ["absent.py", "no_such_package", "no_such_package.inner", ".x"])
def test_a_logger_of_ones_own_that_is_not_there_is_told_before_the_run(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--tracker {re.escape(name)}.*a \.py file"):
        check_trackers(TrackerConfig(tracker=(name,)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch.nosuch", ""),
        ("json", ""),
        ("broken_logger", "import no_such_package"),
        ("broken_logger.py", "import no_such_package\ndef init(): ..."),
        ("broken_logger.py", "init = 3"),
    ],
)
def test_a_logger_of_ones_own_that_cannot_log_is_told_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """And not at the first step."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_logger.py").write_text(text)
    config = TrackerConfig(tracker=(name,))
    check_trackers(config)
    with pytest.raises(UsageError, match=rf"--tracker {name}: .*(import|function (init|or))"):
        make_trackers(config, tmp_path, {})


def test_a_file_that_defines_no_init_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def initialise(): ...")
    with pytest.raises(UsageError, match=r"--tracker .*mine\.py.*no 'init'"):
        check_trackers(TrackerConfig(tracker=(str(tmp_path / "mine.py"),)))
