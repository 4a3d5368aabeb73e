"""``tools/make_task_data.py`` reports mistakes in one line; its files share no prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import make_task_data
import pytest


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *argv: str) -> list[dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["make_task_data.py", "--output", str(output), *argv])
    make_task_data.main()
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = run(monkeypatch, tmp_path / "new" / "train.jsonl", "--num-rows", "20")
    held_out = ["--num-rows", "5", "--split", "heldout", "--disjoint-from"]
    rows = run(monkeypatch, tmp_path / "held.jsonl", *held_out, str(tmp_path / "new/train.jsonl"))
    assert (len(train), len(rows)) == (20, 5)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--num-rows", "0"], "--num-rows 0"),
        (["--num-rows", "9", "--disjoint-from", "no.jsonl"], "no.jsonl"),
        (["--num-rows", "9", "--disjoint-from", "bad.jsonl"], "bad.jsonl:1"),
        (["--num-rows", "9", "--disjoint-from", "same.jsonl"], "--disjoint-from same.jsonl"),
        (["--num-rows", "9", "--output", "bad.jsonl/x.jsonl"], "bad.jsonl"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"question": "1"}\n')
    run(monkeypatch, Path("same.jsonl"), "--num-rows", "9")
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, Path("out.jsonl"), *argv)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and named in printed and printed.count("\n") == 1
    assert not Path("out.jsonl").exists()
