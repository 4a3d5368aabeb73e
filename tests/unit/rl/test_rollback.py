"""A run that goes back to an earlier checkpoint of its own at an alarm."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rl_run import REWARDS, TablePolicy, TableRun, make_run
from support.table_engine import CompareWeights

from mindspeed_rl import train_rl
from mindspeed_rl.checkpoint.resume import checkpoint_path, checkpoints_of, step_of
from mindspeed_rl.core.alarms import RULES, Alarm, Rollback
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.replay.rollback import roll_back
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.trainer_state import run_checkpoint
from mindspeed_rl.trainer_state.checkpoint import LoadedState

RULE = {rule.name: rule for rule in RULES}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[torch.Tensor, str]]:
    """Checkpoints of tables: real folders, whose contents are here, by step."""
    saved: dict[int, tuple[torch.Tensor, str]] = {}

    def save(job: Any, engine: Any, step: int, extra: Any, *_: Any) -> None:
        checkpoint_path(job.config.checkpoint.save, step).mkdir(parents=True)
        saved[step] = engine.table.detach().clone(), json.dumps(extra)

    def load(job: Any, engine: Any, *_: Any) -> LoadedState:
        options = job.config.checkpoint
        if not options.load:
            return LoadedState(0, {})
        step = step_of(checkpoints_of(Path(options.load))[-1])
        engine.table = saved[step][0].clone().requires_grad_()
        return LoadedState(step, json.loads(saved[step][1]))

    monkeypatch.setattr(run_checkpoint, "save", save)
    monkeypatch.setattr(run_checkpoint, "load", load)
    monkeypatch.setattr("mindspeed_rl.rl.update.trace_nonfinite", lambda *_: "traced")
    monkeypatch.setattr(RunReporter, "finish", lambda self, models: None)
    return saved


def run_with(folder: Path, flags: str = "") -> TableRun:
    return make_run(
        folder,
        f"--rl-alarms nonfinite=rollback --save {folder}/save --save-interval 2 --train-iters 6 "
        f"--output-dir {folder}/out {flags}",
        REWARDS,
    )


def with_norms(monkeypatch: pytest.MonkeyPatch, broken: Sequence[int]) -> list[int]:
    """The updates of these numbers have no finite norm; the prompts that are drawn, in order."""
    calls, drawn = [0], list[int]()
    norm, draw = TablePolicy.gradient_norm, PromptSampler.next

    def gradient_norm(self: TablePolicy) -> float:
        calls[0] += 1
        return math.inf if calls[0] in broken else norm(self)

    def next_prompts(self: PromptSampler, count: int) -> list[int]:
        drawn.extend(found := draw(self, count))
        return found

    monkeypatch.setattr(TablePolicy, "gradient_norm", gradient_norm)
    monkeypatch.setattr(PromptSampler, "next", next_prompts)
    return drawn


def test_a_run_goes_back_and_passes_over_the_prompts_since_then(
    tmp_path: Path,
    tables: dict[int, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 6 goes back to step 4, and the steps 5 and 6 are done again, with other prompts."""
    run = run_with(tmp_path)
    log = with_norms(monkeypatch, [6])
    train_rl.train(run.parts)
    drawn = list(log)
    expected = PromptSampler(len(run.parts.data.train), run.config.train.seed)
    assert drawn == expected.next(2 * 8), "each is drawn once, in the order of the run"
    assert len(run.policy.gradients) == 5 + 2
    extra = json.loads(tables[6][1])
    assert (extra["version"], extra["rollbacks"]) == (6, [4])
    again = tables[4][0] - run.policy.gradients[5] - run.policy.gradients[6]
    assert torch.allclose(run.policy.table, again) and run.engine.weights_version == 6
    rows = [json.loads(row) for row in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("run/rollbacks", 0.0) for row in rows] == [0.0] * 4 + [1.0, 1.0]
    told = capsys.readouterr().out
    assert told.count("back to step 4; the prompts since then are passed over") == 1
    assert "step 6: alarm nonfinite: optimizer/grad_norm is inf" in told


def test_the_weights_of_a_checkpoint_are_proven_in_full(
    tmp_path: Path, tables: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the first sync are; all others by a sample."""
    run = run_with(tmp_path)
    with_norms(monkeypatch, [6])
    train_rl.train(run.parts)
    proof = run.parts.weight_sync._proof
    assert isinstance(proof, CompareWeights)
    assert (proof.num_calls, proof.samples) == (2, list(range(len(proof.samples))))
    assert len(proof.samples) >= 5


def test_a_second_rollback_to_the_same_step_ends_the_run(
    tmp_path: Path, tables: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_norms(monkeypatch, [3, 6, 8])
    with pytest.raises(RuntimeError, match=r"step 6: .*went back to step 4 before"):
        # 1 2 | 3 goes back to 2 | 3 4 | 5 goes back to 4 | 5 | 6 would go there again
        train_rl.train(run_with(tmp_path).parts)


def test_without_an_earlier_checkpoint_the_run_ends(
    tmp_path: Path, tables: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_norms(monkeypatch, [2])
    with pytest.raises(RuntimeError, match="has no checkpoint of a step before 2"):
        train_rl.train(run_with(tmp_path).parts)


def test_checkpoints_of_the_steps_that_a_rule_counted_are_set_aside(
    tmp_path: Path, tables: dict[int, Any]
) -> None:
    """Of a rule that waits for ten steps the run goes back behind the first of them."""
    run = run_with(tmp_path)
    train_rl.train(run.parts)
    run.to_train()
    run.state.step = 5
    report = RunReporter(run.parts, run.state, 5)
    rule = replace(RULE["truncation"], patience=3, action="rollback")
    restored, _ = roll_back(run.parts, run.state, report, Rollback(Alarm(rule, "too long"), 5))
    assert (restored.step, restored.rollbacks) == (2, (2,))
    names = sorted(path.name for path in (tmp_path / "save").iterdir())
    assert names == ["iter_0000002", "iter_0000004.left", "iter_0000006.left"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rl-alarms nonfinite=rollback", "give --save with --save-interval"),
        ("--rl-alarms nonfinite=rollback --save x", "give --save with --save-interval"),
        (
            "--rl-alarms grad-norm:9=rollback --save x --save-interval 1 --no-save-optim",
            "remove --no-save-optim",
        ),
        ("--rl-alarms dead-rewards=rollback", "earlier weights do not repair"),
    ],
)
def test_a_rollback_needs_whole_checkpoints(tmp_path: Path, flags: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make_run(tmp_path, flags)
