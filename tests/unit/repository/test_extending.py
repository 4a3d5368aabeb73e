"""The examples of docs/extending.md, executed; test_adding_a_family.py runs that of a family."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from make_tiny_model import build_tokenizer
from support.architecture import ROOT
from support.pages import python_files
from support.rl_run import make_run
from support.table_engine import TableEngine, single_rank

from mindspeed_rl.algorithms import advantages, policy_losses
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings
from mindspeed_rl.algorithms.types import Denominators, LossInputs, Sequences
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments import LocalRunner, Observation, resolve_environment
from mindspeed_rl.metrics.loggers import RunLogger
from mindspeed_rl.metrics.trackers import TrackerBackend
from mindspeed_rl.rewards import RewardRequest, RewardSpec, WeightedReward, score_sample
from mindspeed_rl.rollout.engine import InferenceEngine

FILES = python_files("extending.md")
ROWS = re.findall(r"```python\n# row\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.S)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a reader who copied the files of the page."""
    (tmp_path / "my").mkdir()
    for name, text in FILES.items():
        if name.startswith("my/"):
            (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def added_to(module: ModuleType, file: str, name: str) -> Any:
    """What the row of the page puts under ``name``, its function defined at the end of a module."""
    names = dict(vars(module))
    exec(FILES[file], names)
    (row,) = (row for row in ROWS if f'"{name}"' in row)
    return eval(row, names)[name]


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
    runner = LocalRunner(resolve_environment("my/riddle.py:Riddle"), tokenizer)
    assert runner.reset({0: Prompt(0, (1,), "Which?", "42")}) == {0: Observation()}
    answers = [
        runner.step({0: tuple(tokenizer(text)["input_ids"])})[0] for text in ("41", "It is 42")
    ]
    assert isinstance(answers[0], Observation) and isinstance(answers[1], Observation)
    assert "Try again." in tokenizer.decode(list(answers[0].token_ids))
    assert (answers[0].done, answers[0].reward) == (False, 0.0)
    assert answers[1] == Observation(done=True, reward=1.0)


def test_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formula, and a step that is trained with it."""
    added = added_to(advantages, "mindspeed_rl/algorithms/advantages.py", "median_baseline")
    rows = [[1.0, 0.0, 5.0], [2.0, math.nan, 2.0]]
    rewards = torch.tensor(rows, dtype=torch.float64)
    found = added.of_samples(advantages.GroupRewards(rewards, torch.ones(2, 3)))
    assert found[0].tolist() == [r - statistics.median(rows[0]) for r in rows[0]]
    assert found[1].tolist() == [0.0, 0.0, 0.0]
    monkeypatch.setitem(advantages.ESTIMATORS, "grpo", added)
    with single_rank():
        run = make_run(tmp_path, "", {0: 1.0, 1: 0.0, 2: 5.0})
        batches = run.prepared(run.generate().samples)
    found_of = {
        sample_id: set(m.column("advantages")[m.sequence_of == position].tolist())
        for m in batches.micro_batches
        for position, sample_id in enumerate(m.sample_ids)
    }
    assert [found_of[i] for i in range(6)] == [{0.0}, {-1.0}, {4.0}, {0.0}, {0.0}, {0.0}]


def test_policy_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient by hand: of the ratios 1, 1.5 and 0.5."""
    added = added_to(policy_losses, "mindspeed_rl/algorithms/policy_losses.py", "spo")
    monkeypatch.setattr(
        "mindspeed_rl.algorithms.losses.POLICY_LOSSES",
        {**policy_losses.POLICY_LOSSES, "spo": added},
    )
    ratios, signs, eps = [1.0, 1.5, 0.5], [1.0, -2.0, 1.0], 0.25
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=None,
        advantages=torch.tensor(signs, dtype=torch.float64),
        sequences=Sequences(torch.zeros(3, dtype=torch.int64), torch.tensor([3.0])),
    )
    settings = LossSettings(
        policy_loss="spo",
        surrogate=SurrogateSettings(eps_upper=eps),
        aggregation="token-sum",
    )
    outputs = policy_loss(inputs, settings, Denominators.of([3]))
    pairs = list(zip(ratios, signs, strict=True))
    value = sum(-(r * a - abs(a) * (r - 1) ** 2 / (2 * eps)) for r, a in pairs)
    assert outputs.loss.item() == pytest.approx(value)
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    by_hand = [-r * (a - abs(a) * (r - 1) / eps) for r, a in pairs]
    assert gradient.tolist() == pytest.approx(by_hand)
    clipped = outputs.terms["policy/clip_fraction"]
    assert float(clipped.sum / clipped.weight) == pytest.approx(2 / 3)  # type: ignore[union-attr]


def test_tracker(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the page behind the logger of a run, which is stopped and resumed."""
    monkeypatch.syspath_prepend(str(reader / "my"))
    names: dict[str, Any] = {}
    exec("from mindspeed_rl.config.diagnostics import Tracker", names)
    tracker = eval(FILES["mindspeed_rl/config/diagnostics.py"].split("\n", 1)[1], names)

    def logger() -> RunLogger:
        arguments = {**tracker.arguments, "config": {}}
        backend = TrackerBackend(tracker.package, arguments, tracker.name or "run")
        return RunLogger(reader / "out", True, ("jsonl",), others=[backend])

    with logger() as first:
        for step in (1, 2, 3):
            first.log(step, {"reward/mean": step / 2, "loss": math.nan})
    with logger() as resumed:
        resumed.truncate_after(2)
        resumed.log(3, {"reward/mean": 9.0})

    def rows(name: str) -> list[list[str]]:
        with (reader / "csv" / name).open(newline="") as file:
            return list(csv.reader(file))

    assert rows("run.csv") == [[str(s), "reward/mean", str(s / 2)] for s in (1, 2, 3)]
    assert rows("run from step 2.csv") == [["2", "reward/mean", "1.0"], ["3", "reward/mean", "9.0"]]


def test_the_smallest_engine_has_all_that_the_protocol_asks_for() -> None:
    """The page points to it; weights of its kind do not come through ``load_tensor``."""
    asked = {
        name
        for base in InferenceEngine.__mro__
        for name in (*vars(base), *vars(base).get("__annotations__", {}))
        if not name.startswith("_") and base.__module__.startswith("mindspeed_rl")
    }
    assert asked - {"load_tensor"} <= set(dir(TableEngine()))
    text = (ROOT / "docs/extending.md").read_text()
    table = text[text.index("| member | what it promises |") :]
    listed = re.findall(
        r"`(\w+)(?:\([^`]*\))?`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))
    )
    assert asked - {"weight_format"} <= set(listed)
