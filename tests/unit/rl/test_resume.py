"""Stopping and resuming a run whose models are tables: when it saves, and what comes back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rl_run import NUM_PROMPTS, REWARDS, TableRun, make_run
from support.table_engine import first_table

from mindspeed_rl.checkpoint.save_clock import save_is_due
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.rl.report import RunReporter
from mindspeed_rl.rl.resume import save_if_due, start
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.saved_responses import carryover_state
from mindspeed_rl.trainer_state import run_checkpoint
from mindspeed_rl.trainer_state.checkpoint import LoadedState

FLAGS = "--grpo-kl-beta 0.1 --rl-kl-estimator k1 --rl-kl-target 0.1 --rl-kl-horizon 60 "


@pytest.mark.parametrize(
    ("flags", "due"),
    [
        ("", []),
        ("--save x --save-interval 0", [5]),
        ("--save x --save-interval 1", [1, 2, 3, 4, 5]),
        ("--save x --save-interval 2", [2, 4, 5]),
        ("--save x --save-interval 5", [5]),
        ("--save x --save-interval 7", [5]),
    ],
)
def test_a_checkpoint_is_due_at_every_interval_and_at_the_end(
    tmp_path: Path, flags: str, due: list[int]
) -> None:
    options = make_run(tmp_path, flags).config.checkpoint
    assert [n for n in range(1, 6) if save_is_due(options, 5, n)] == due


def resumed(run: TableRun) -> RunReporter:
    run.state, report = start(run.parts)
    return report


def test_a_resumed_run_has_the_state_of_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a save and a restart: prompts, version, KL coefficient and lengths go on.

    The policy is that of the save, the reference is not.
    """
    saved: dict[str, Any] = {}

    def save(job: Any, engine: Any, step: int, extra: Any, *_: Any) -> None:
        saved.update(step=step, extra=json.loads(json.dumps(extra)))
        saved["table"] = engine.table.detach().clone()

    def load(job: Any, engine: Any, companions: Any, before: Any) -> LoadedState:
        if not saved:
            return LoadedState(0, {})
        engine.table = saved["table"].requires_grad_()
        return LoadedState(saved["step"], saved["extra"])

    monkeypatch.setattr(run_checkpoint, "save", save)
    monkeypatch.setattr(run_checkpoint, "load", load)
    flags = FLAGS + "--save x --save-interval 2 --global-batch-size 3"
    run = make_run(tmp_path, flags, REWARDS)
    run.reference.table = first_table() - 0.5  # above its target
    report = resumed(run)
    for step in (1, 2):
        run.update(run.batches(step), step)
        save_if_due(run.parts, run.state, report)
    assert saved["step"] == 2 and run.state.kl_beta > 0.1 and run.state.version == 4
    again = make_run(tmp_path, flags, REWARDS)
    assert resumed(again).start == 2
    assert (again.state.version, again.state.kl_beta) == (run.state.version, run.state.kl_beta)
    lengths = again.state.lengths.state_dict()
    assert lengths == run.state.lengths.state_dict() and lengths["relative"]
    assert again.state.sampler.next(20) == run.state.sampler.next(20)
    assert torch.equal(again.policy.table, run.policy.table)
    assert torch.equal(again.reference.table, first_table()), "that of the start, not of the save"
    assert not torch.equal(again.policy.table, first_table())


def test_a_run_that_is_resumed_within_an_epoch_by_length_draws_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps are an epoch; the second one is ordered by the lengths known at its beginning."""
    flags = "--prompt-order by-length --save x --save-interval 8 --train-iters 20"
    run = make_run(tmp_path, flags, REWARDS)
    report = RunReporter(run.parts, run.state)
    saved: list[LoadedState] = []

    def save(job: Any, engine: Any, step: int, extra: Any, *_: Any) -> None:
        saved.append(LoadedState(step, json.loads(json.dumps(extra))))

    monkeypatch.setattr(run_checkpoint, "save", save)
    drawn = [s.prompt_index for step in range(1, 9) for s in run.generate(step).samples[::3]]
    save_if_due(run.parts, run.state, report)
    monkeypatch.setattr(run_checkpoint, "load", lambda *_: saved[0])
    again = make_run(tmp_path, flags, REWARDS)
    assert resumed(again).start == 8
    for step in range(9, 19):
        wanted = [s.prompt_index for s in run.generate(step).samples[::3]]
        assert [s.prompt_index for s in again.generate(step).samples[::3]] == wanted
        drawn += wanted
    for epoch in range(3):
        assert sorted(drawn[12 * epoch : 12 * (epoch + 1)]) == list(range(NUM_PROMPTS))
    states = [side.state.sampler.state_dict() for side in (run, again)]
    assert states[0] == states[1] and states[0]["by_length"]["block"] == 2
    shuffled = PromptSampler(NUM_PROMPTS, run.config.train.seed).next(36)
    assert drawn[:12] == shuffled[:12] and drawn[12:] != shuffled[12:]


def checkpoint_of(run: TableRun, **changes: Any) -> LoadedState:
    """A checkpoint after the first step of a run."""
    extra = {
        "sampler": run.state.sampler.state_dict(),
        "version": 3,
        "kl_beta": 0.7,
        "carryover": [],
        "num_partial": 0,
        "num_groups": 1,
        "lengths": run.state.lengths.state_dict(),
        "report": RunReporter(run.parts, run.state).state_dict(),
    }
    return LoadedState(1, extra | changes)


def test_a_record_that_is_not_finite_is_neither_saved_nor_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coefficient of NaN; a reward of NaN is that of a response that goes on."""
    flags = "--rl-kl-target 0.1 --grpo-kl-beta 0.2 --save x --save-interval 1 --train-iters 9"
    run = make_run(tmp_path, flags, REWARDS)
    run.state.step, run.state.kl_beta = 1, math.nan
    monkeypatch.setattr(run_checkpoint, "save", lambda *_: pytest.fail("it was saved"))
    with pytest.raises(FloatingPointError, match=r"step 1 is not saved.* kl_beta is nan"):
        save_if_due(run.parts, run.state, RunReporter(run.parts, run.state))
    for change, wrong in (({"kl_beta": math.inf}, True), ({"report_note": 1.0}, False)):
        again = make_run(tmp_path, flags, REWARDS)
        loaded = checkpoint_of(again, **change)
        monkeypatch.setattr(run_checkpoint, "load", lambda *_, found=loaded: found)
        if wrong:
            with pytest.raises(UsageError, match="record of step 1 kl_beta is inf"):
                start(again.parts)
        else:
            assert resumed(again).start == 1


def test_a_constant_coefficient_is_that_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without --rl-kl-target may be resumed with another --grpo-kl-beta."""
    run = make_run(tmp_path, "--grpo-kl-beta 0.2", REWARDS)
    loaded = checkpoint_of(run)
    monkeypatch.setattr(run_checkpoint, "load", lambda *_: loaded)
    assert resumed(run).start == 1
    assert (run.state.version, run.state.kl_beta) == (3, 0.2)


def test_changed_data_starts_a_new_epoch_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is carried over: prompts and lengths are of other data."""
    saved = PromptSampler(NUM_PROMPTS, seed=1, fingerprint="old")
    saved.next(3)
    run = make_run(tmp_path)
    loaded = checkpoint_of(run, sampler=saved.state_dict(), carryover=None, lengths=None)
    monkeypatch.setattr(run_checkpoint, "load", lambda *_: loaded)
    with pytest.raises(ValueError, match=r"fingerprint .*add --allow-changed-data"):
        start(run.parts)
    run = make_run(tmp_path, "--allow-changed-data")
    assert resumed(run).start == 1 and run.state.version == 3
    assert not run.state.carried_groups and run.state.sampler.state_dict()["epoch"] == 1


def test_a_replay_starts_before_its_step_on_the_prompts_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, f"--save {tmp_path} --replay 3 {tmp_path}")
    asked: list[int] = []
    loaded = LoadedState(0, {})

    def load(job: Any, engine: Any, companions: Any, before: int) -> LoadedState:
        asked.append(before)
        return loaded

    monkeypatch.setattr(run_checkpoint, "load", load)
    with pytest.raises(UsageError, match=r"--replay 3: .* has no checkpoint of an earlier step"):
        start(run.parts)
    other = PromptSampler(NUM_PROMPTS, seed=1, fingerprint="old").state_dict()
    loaded = checkpoint_of(run, sampler=other)
    with pytest.raises(UsageError, match=r"--replay 3: the prompts .*--prompt-data"):
        start(run.parts)
    loaded = checkpoint_of(run)
    assert resumed(run).start == 1 and asked == [3, 3, 3]
    first = make_run(tmp_path, f"--replay 1 {tmp_path}")
    loaded = LoadedState(0, {})
    assert resumed(first).start == 0, "step 1 starts from --hf-checkpoint"


@pytest.mark.parametrize("filters", [True, False])
def test_groups_beyond_the_need_are_dropped_without_the_filter(
    filters: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only a run with the filter trains on them, so another run says so instead of keeping them."""
    run = make_run(tmp_path, "--grpo-filter-groups-with-same-reward" if filters else "", REWARDS)
    group = [RolloutInfo(i, 5, 2, 2, True, 3, 0, float(i)) for i in range(2)]
    response = {
        TOKEN_IDS.name: torch.tensor([4, 1]),
        ROLLOUT_LOGPROBS.name: torch.tensor([-1.5, -1]),
    }
    carried = carryover_state([group], [response] * 2)
    loaded = checkpoint_of(run, carryover=carried)
    monkeypatch.setattr(run_checkpoint, "load", lambda *_: loaded)
    resumed(run)
    assert len(run.state.carried_groups) == int(filters)
    assert ("--grpo-filter-groups-with-same-reward" in capsys.readouterr().out) != filters
