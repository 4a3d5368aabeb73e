"""What a run writes: whole files, strict JSON, and no step twice after a resume."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.full_disk import largest_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_rl.core.files import atomic_path, write_text_atomic
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.job import Job
from mindspeed_rl.metrics.jsonl import JsonlWriter, encode_json, read_jsonl
from mindspeed_rl.metrics.loggers import RunLogger, TensorBoardBackend
from mindspeed_rl.metrics.progress import RunProgress


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(path)]


# ---- files


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "a.json"
    write_text_atomic(target, "old")
    write_text_atomic(target, "new")
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_text_atomic(target, "old")
    with pytest.raises(KeyError), atomic_path(target) as temporary:
        assert temporary.suffix == ".json"
        temporary.write_text("half")
        raise KeyError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# ---- a full disk


def test_records_wait_while_the_disk_is_full_and_lines_stay_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.append(1, {"a": "x" * 80})
    size = path.stat().st_size
    with largest_file(size + 30):  # the second record fits in part
        for step in (2, 3):
            writer.append(step, {"a": "y" * 80})
        assert path.stat().st_size == size and _steps(path) == [1]
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            writer.close()
    assert len([r for r in caplog.records if "metrics.jsonl" in r.getMessage()]) == 1
    writer.append(4, {"a": 0})
    assert _steps(path) == [1, 2, 3, 4]
    writer.close()


def test_a_disk_that_stays_full_ends_the_run_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mindspeed_rl.metrics.jsonl.MOST_WAITING", 2)
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with largest_file(4):
        for step in (1, 2):
            writer.append(step, {})
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            writer.append(3, {})


# ---- JSON


def test_nonfinite_numbers_become_null_and_are_named() -> None:
    text = encode_json({"a": math.nan, "b": {"c": [1.0, -math.inf]}, "d": np.float32(0.5)})
    assert json.loads(text) == {
        "a": None,
        "b": {"c": [1.0, None]},
        "d": 0.5,
        "nonfinite": ["a", "b.c.1"],
    }
    assert "nonfinite" not in encode_json({"a": 1.0, "flag": True})


def test_what_a_record_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match=r"a\.b is a object"):
        encode_json({"a": {"b": object()}})


@given(st.dictionaries(st.text(min_size=1), st.floats() | st.text() | st.integers() | st.none()))
def test_encoded_records_are_one_strict_line(record: dict[str, Any]) -> None:
    record.pop("nonfinite", None)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = encode_json(record)
    assert "\n" not in text
    decoded = json.loads(text, parse_constant=refuse)
    lost = set(decoded.pop("nonfinite", []))
    assert lost == {k for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    assert decoded == {k: None if k in lost else v for k, v in record.items()}


# ---- JSON lines


@pytest.mark.parametrize("resume_at", [0, 2, 9])
def test_truncation_keeps_what_the_checkpoint_knows(tmp_path: Path, resume_at: int) -> None:
    path = tmp_path / "a.jsonl"
    writer = JsonlWriter(path)
    for step in (1, 2, 2, 3, 4):
        writer.append(step, {"text": "line\rwith\nends\u2028"})
    before = path.read_bytes().splitlines(keepends=True)  # on disk when append returns
    writer.truncate_after(resume_at)
    kept = [step for step in (1, 2, 2, 3, 4) if step <= resume_at]
    assert path.read_bytes().splitlines(keepends=True) == before[: len(kept)]
    writer.append(resume_at + 1, {})
    writer.close()
    assert _steps(path) == [*kept, resume_at + 1]


@pytest.mark.parametrize("num_bytes", [1, 200_000])  # one read from the end, or several
@pytest.mark.parametrize("truncate", [True, False])
def test_torn_tail_of_a_killed_writer_disappears(
    tmp_path: Path, truncate: bool, num_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    whole = '{"step": 1, "text": "\u00e9"}\n'.encode()
    # ends inside a character
    path.write_bytes(whole + b"x" * num_bytes + "\u00e9".encode()[:1])
    assert _steps(path) == [1]
    writer = JsonlWriter(path)
    if truncate:
        writer.truncate_after(1)
        assert path.read_bytes() == whole
    writer.append(2, {})
    writer.close()
    assert _steps(path) == [1, 2]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"x": 1}', '{"step": "1"}'])
def test_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_jsonl(path))


# ---- RunLogger


def boarded(output: Path, events: Path | None = None) -> RunLogger:
    """A logger that writes to TensorBoard as well."""
    return RunLogger(output, True, [TensorBoardBackend(events or output / "tensorboard")])


def _tensorboard(output_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(output_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_resumed_run_has_every_step_once_in_every_backend(tmp_path: Path) -> None:
    with closing(boarded(tmp_path)) as first:
        for step in (1, 2, 3, 4):
            first.log(step, {"reward/mean": float(step)})
    with closing(boarded(tmp_path)) as resumed:
        resumed.truncate_after(2)
        for step in (3, 4, 5):
            resumed.log(step, {"reward/mean": 10.0 * step})
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["reward/mean"]) for record in records] == expected
    assert _tensorboard(tmp_path, "reward/mean") == expected


def test_evaluations_are_logged_under_their_own_step(tmp_path: Path) -> None:
    """Before the first step, beside a step, and again after a resume: each point once."""
    with closing(boarded(tmp_path)) as first:
        first.log(0, {"eval/accuracy": 0.0})
        for step in (1, 2, 3):
            first.log(step, {"reward/mean": float(step)})
            first.log(step, {"eval/accuracy": float(step)})
    everything = [(r["step"], "eval/accuracy" in r) for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert everything == [
        (0, True), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True),
    ]  # fmt: skip
    expected = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert _tensorboard(tmp_path, "eval/accuracy") == expected
    # The checkpoint of step 2 was saved before the evaluation of step 2.
    with closing(boarded(tmp_path)) as resumed:
        resumed.truncate_after(2)
        resumed.log(2, {"eval/accuracy": 2.0})
        resumed.log(3, {"reward/mean": 3.0})
        resumed.log(3, {"eval/accuracy": 3.0})
    again = [(r["step"], "eval/accuracy" in r) for r in read_jsonl(tmp_path / "metrics.jsonl")]
    assert again == everything
    assert _tensorboard(tmp_path, "eval/accuracy") == expected
    assert _tensorboard(tmp_path, "reward/mean") == expected[1:], "step 2 is written again"


def test_a_fresh_run_hides_the_events_of_another_one(tmp_path: Path) -> None:
    """In a --tensorboard-dir of the user's; the other run's files stay."""
    events = tmp_path / "mine" / "tensorboard"
    for output, value in (("a", 1.0), ("b", 2.0)):
        with closing(boarded(tmp_path / output, events)) as logger:
            logger.log(1, {"reward/mean": value})
    assert _tensorboard(tmp_path / "mine", "reward/mean") == [(1, 2.0)]
    assert len(list(events.glob("events.out.tfevents.*"))) == 2
    assert not (tmp_path / "a" / "tensorboard").exists()


def test_only_the_writer_touches_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(RunLogger(tmp_path / "run", is_writer=False)) as logger:
        logger.truncate_after(0)
        logger.log(1, {"reward/mean": 1.0})
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


# ---- progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run_progress(stream: io.StringIO, is_writer: bool = True) -> str:
    now_s = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(time, "monotonic", lambda: now_s)
        progress = RunProgress(7, 2, "GRPO", is_writer, 2)
        for step in range(3, 8):
            now_s += 10.0
            progress.update(step, {"reward": 0.5, "tokens/s": 1234.0})
        progress.close()
    return stream.getvalue()


LINES = [
    "GRPO 4/7 | reward 0.5 | tokens/s 1234 | elapsed 0:00:20 | left 0:00:30",
    "GRPO 6/7 | reward 0.5 | tokens/s 1234 | elapsed 0:00:40 | left 0:00:10",
    "GRPO 7/7 | reward 0.5 | tokens/s 1234 | elapsed 0:00:50 | left 0:00:00",
]


def test_lines_with_the_time_of_day() -> None:
    lines = _run_progress(io.StringIO()).splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == LINES
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", line.split(" ", 1)[0]) for line in lines)


def test_a_terminal_has_a_bar_below_the_lines() -> None:
    shown = _run_progress(_Terminal())
    assert all(line + "\n" in shown for line in LINES)
    last = shown.rstrip("\n").split("\r")[-1]
    assert last.startswith("GRPO: 100%")
    assert "7/7" in last


def test_what_is_printed_elsewhere_does_not_stick_to_the_bar() -> None:
    stream, out = _Terminal(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", out)
        progress = RunProgress(7, 2, "GRPO", True, 2)
        job = Job(*[cast(Any, None)] * 2, World(0, 1, 0, 1), *[cast(Any, None)] * 3, 1)
        before = len(stream.getvalue())
        job.log_rank0("evaluation after step 3: 50 %")
        progress.close()
    assert out.getvalue() == "evaluation after step 3: 50 %\n"
    assert stream.getvalue()[before:].startswith("\r"), "the bar is cleared and drawn again"


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_no_progress_from_other_ranks(stream: type[io.StringIO]) -> None:
    assert _run_progress(stream(), is_writer=False) == ""


def test_curves_that_do_not_fit_on_the_disk_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer is a thread that ends with the error, which every later call meets."""
    backend = TensorBoardBackend(tmp_path / "tensorboard")
    backend.log(1, {"a": 1.0})
    backend.close()
    with largest_file(1):
        for step in (2, 3, 4):
            backend.log(step, {"a": float(step)})
            backend.close()
    backend.log(5, {"a": 5.0})
    backend.close()
    found = _tensorboard(tmp_path, "a")  # files of one second have no order among each other
    assert sorted(step for step, _ in found) == [1, 5]
    assert len([r for r in caplog.records if "tensorboard" in r.getMessage()]) == 1
