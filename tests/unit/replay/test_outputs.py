"""What a replay is compared with in the folder of a run, and which folders are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config.replay import ReplayConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.replay import outputs
from mindspeed_rl.replay.record import StepRecord, save_record
from mindspeed_rl.replay.run import (
    _record_to_compare,
    new_record_path,
    reference_of,
    same_layout,
)


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_without_the_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--replay 2 .*no metrics.jsonl.*--output-dir"):
        outputs.require_step(tmp_path, 2)
    write(tmp_path / "metrics.jsonl", {"step": 0, "eval/reward": 1.0})
    with pytest.raises(UsageError, match=r"--replay 2 .*no finished step"):
        outputs.require_step(tmp_path, 2)
    rows = [{"step": n, "loss/policy": 0.5} for n in (1, 2, 3)]
    write(tmp_path / "metrics.jsonl", *rows, {"step": 3, "eval/reward": 1.0})
    outputs.require_step(tmp_path, 2)
    assert outputs.trained_steps(tmp_path) == {row["step"]: row for row in rows}
    with pytest.raises(UsageError, match=r"--replay 4 .*the steps 1 to 3"):
        outputs.require_step(tmp_path, 4)


def test_metrics_of_the_machine_do_not_count_nor_those_of_ranks_in_another_layout() -> None:
    row = {"step": 1, "loss/policy": 0.5, "time/step_s": 3.0, "reshard/bytes_sent": 7.0}
    assert outputs.comparable_metrics(row, any_layout=False).keys() == {
        "step", "loss/policy", "reshard/bytes_sent"
    }  # fmt: skip
    assert outputs.comparable_metrics(row, any_layout=True) == {"loss/policy": 0.5}


def test_metrics_that_differ_are_told_to_the_last_bit() -> None:
    mine = {"a": 0.1 + 0.2, "b": None, "c": 1.0}
    assert outputs.metric_lines(mine, {"a": 0.1 + 0.2, "b": None, "c": 1.0}, 0.0) == []
    lines = outputs.metric_lines(mine, {"a": 0.3, "b": None, "d": 1.0}, 0.0)
    assert lines == [
        "a: 0.30000000000000004 instead of 0.3",
        "c: 1.0 instead of 'absent'",
        "d: 'absent' instead of 1.0",
    ]
    assert outputs.metric_lines(mine, {"a": 0.3, "b": None, "c": 1.0}, 1e-6) == []
    many = outputs.metric_lines({str(n): n for n in range(9)}, {str(n): -1 for n in range(9)}, 0.0)
    assert len(many) == 6 and many[-1] == "9 metrics of 9 differ"


def test_the_first_place_where_a_rollout_differs_is_told(tmp_path: Path) -> None:
    base = {"step": 2, "sample_id": 4, "prompt": "p", "response": "r", "reward": 1.0,
            "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0],
            }  # fmt: skip

    def lines(tolerance: float = 0.0, **changes: Any) -> list[str]:
        for name, row in (("mine", base | changes), ("other", base)):
            (tmp_path / name).mkdir(exist_ok=True)
            write(tmp_path / name / "rollouts.jsonl", {**row, "step": 1, "reward": 9}, row)
        pair = [outputs.dumped_rollouts(tmp_path / name, 2) for name in ("mine", "other")]
        return outputs.rollout_lines(*pair, tolerance)

    assert lines() == []
    assert lines(response_ids=[3, 7, 5], reward=0.0) == [
        "sample 4, response_ids, place 1: 7 instead of 4"
    ]
    assert lines(response_ids=[3, 4]) == ["sample 4, response_ids: 2 instead of 3"]
    assert lines(1.0, response_ids=[3, 4, 6]) == ["sample 4, response_ids, place 2: 6 instead of 5"]
    near = {"logprobs": [-1.0, -2.00001, -3.0]}
    assert lines(**near) == ["sample 4, logprobs, place 1: -2.00001 instead of -2.0"]
    assert lines(1e-4, **near) == []
    assert lines(prompt="q", prompt_ids=[1, 2]) == ["sample 4, prompt: 'q' instead of 'p'"]
    assert lines(reward=None) == ["sample 4, reward: None instead of 1.0"]


def test_records_are_never_replaced_and_are_of_one_step(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        path = new_record_path(tmp_path)
        save_record(StepRecord(3, {}, {}, ()), path)
        names.append(path.name)
    assert names == ["record.npz", "record-2.npz", "record-3.npz"]
    assert _record_to_compare(path, 3).step == 3
    options = ReplayConfig(("3", str(tmp_path)), replay_compare=str(path))
    assert reference_of(options) == path, "also one that is not there is asked for"
    options = replace(options, replay_compare="")
    assert reference_of(options) is None
    save_record(StepRecord(3, {}, {}, ()), new_record_path(options.folder))
    assert reference_of(options) == tmp_path / "replay/step_0000003/record.npz"
    with pytest.raises(UsageError, match=r"--replay-compare .*record-3.npz.* step 3.* step 4"):
        _record_to_compare(path, 4)


def test_the_layout_of_a_first_step_is_that_of_the_first_start(tmp_path: Path) -> None:
    """The record of a start is renamed by the one that resumes it."""
    flags = dict.fromkeys(outputs.LAYOUT_FLAGS, 1) | {"--lr": 0.5}
    other = flags | {"--context-parallel-size": 2}

    def record(name: str, ranks: int, found: dict[str, Any]) -> None:
        text = json.dumps({"machine": {"ranks": ranks}, "flags": found})
        (tmp_path / name).write_text(text)

    assert outputs.began_alike(tmp_path, 4, flags), "nothing is known"
    record("config.json", 4, flags | {"--lr": 0.25})
    assert outputs.began_alike(tmp_path, 4, flags)
    assert not outputs.began_alike(tmp_path, 2, flags)
    assert not outputs.began_alike(tmp_path, 4, other)
    record("config-until-step-100.json", 4, flags)
    record("config-until-step-20.json", 8, other)
    assert outputs.began_alike(tmp_path, 8, other)
    (tmp_path / "config-until-step-20.json").write_text("{")
    assert outputs.began_alike(tmp_path, 3, flags)


def test_layouts_are_compared_as_far_as_both_are_known() -> None:
    mine = {"tp": 2, "pp": 1, "engine_tp": 1}
    assert same_layout(mine, {"tp": 2, "pp": 1}) and not same_layout(mine, {"tp": 1, "pp": 1})
    assert same_layout(mine, {})
