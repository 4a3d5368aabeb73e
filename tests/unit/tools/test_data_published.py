"""Published data sets from made-up files in their formats, down to what a run reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from prepare_data import BOXED, main, prepare

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards import RewardRequest, resolve_reward

GSM8K = [
    {"question": f"Tom has {i} apples and buys 1000. How many?",
     "answer": f"He has {i}+1000 = <<{i}+1000={i + 1000}>>{i + 1000}.\n#### 1,{i:03d}"}
    for i in range(5)
]  # fmt: skip
DEEPSCALER = [
    {"problem": "What is half of one?", "answer": "\\frac{1}{2}", "solution": "Divide."},
    {"problem": "What is 2 x 3?", "answer": "6", "solution": ""},
    {"problem": "Solve.", "answer": "1", "solution": ""},
    {"problem": "Solve.", "answer": "2", "solution": ""},
]


def dapo(index: int) -> dict[str, Any]:
    text = (
        f"Solve. The last line is of the form Answer: $Answer.\n\nWhat is {index} + 1?\n\nRemember."
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(index + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{index}"},
    }


def write(folder: Path, name: str, rows: list[dict[str, Any]], suffix: str) -> Path:
    file = folder / f"{name}{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_gsm8k(suffix: str, tmp_path: Path) -> None:
    found = prepare("gsm8k", write(tmp_path, "gsm8k", GSM8K, suffix))
    assert [row["answer"] for row in found.train] == ["1000", "1001", "1002", "1003", "1004"]
    assert found.train[3] == {
        "prompt": [{"role": "user", "content": f"{GSM8K[3]['question']}\n{BOXED}"}],
        "answer": "1003", "source": "gsm8k",
    }  # fmt: skip
    assert found.heldout == [] and found.num_read == 5 and found.num_repeated == 0


def test_deepscaler_leaves_contradictions_out(tmp_path: Path) -> None:
    found = prepare("deepscaler", write(tmp_path, "deepscaler", DEEPSCALER, ".json"))
    assert [row["answer"] for row in found.train] == ["\\frac{1}{2}", "6"]
    assert (found.num_read, found.num_repeated, found.num_contradicting) == (4, 1, 1)


def test_dapo_math_is_asked_once(tmp_path: Path) -> None:
    rows = [dapo(i % 4) for i in range(12)]
    found = prepare("dapo-math-17k", write(tmp_path, "dapo", rows, ".parquet"))
    assert [row["answer"] for row in found.train] == ["1", "2", "3", "4"]
    assert found.num_repeated == 8 and found.num_contradicting == 0
    assert found.train[0]["prompt"][0]["content"].startswith("Solve. The last line")


def test_held_out_questions_do_not_depend_on_the_order_and_are_not_trained(tmp_path: Path) -> None:
    first = prepare("gsm8k", write(tmp_path, "a", GSM8K, ".jsonl"), 2)
    second = prepare("gsm8k", write(tmp_path, "b", GSM8K[::-1], ".jsonl"), 2)
    held = [row["prompt"][0]["content"] for row in first.heldout]
    assert len(held) == 2 and len(first.train) == 3
    assert sorted(held) == sorted(row["prompt"][0]["content"] for row in second.heldout)
    assert not {row["prompt"][0]["content"] for row in first.train} & set(held)


@pytest.mark.parametrize(
    ("name", "rows", "named"),
    [
        ("gsm8k", [{"a": "4"}], "question"),
        ("gsm8k", [{"question": "a", "answer": "4"}], "####"),
        ("deepscaler", GSM8K, "problem"),
        ("dapo-math-17k", DEEPSCALER, "prompt"),
        ("dapo-math-17k", [dapo(1) | {"reward_model": {}}], "reward_model.ground_truth"),
    ],
)
def test_another_file_is_refused_with_its_line(
    name: str, rows: list[dict[str, Any]], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=named) as refused:
        prepare(name, write(tmp_path, "x", rows, ".jsonl"))
    assert "x.jsonl:1" in str(refused.value)


def test_the_command_writes_what_a_run_reads_and_the_math_reward_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "gsm8k", GSM8K, ".jsonl")
    target = tmp_path / "out"
    argv = ["--dataset", "gsm8k", "--input", str(file), "--output", str(target)]
    assert main([*argv, "--heldout", "1"]) == 0
    assert "5 rows, 0 repeated" in capsys.readouterr().out
    rows = [json.loads(line) for line in (target / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and len((target / "heldout.jsonl").read_text().splitlines()) == 1
    math = resolve_reward("math")
    for row in rows:
        right, wrong = f"so \\boxed{{{row['answer']}}}", "so \\boxed{7}"
        scores = [math(RewardRequest(0, "", r, row["answer"], "stop", 3)) for r in (right, wrong)]
        assert scores == [1.0, 0.0]
    for refused in ("9", "-1"):
        assert main([*argv, "--heldout", refused]) == 2
        printed = capsys.readouterr().err
        assert f"--heldout {refused}" in printed and printed.count("\n") == 1


# ---- any data set, by the names of its columns

OWN = [
    {"q": f"How many are {i} and 1?", "meta": {"gold": f"It is so. A: {i + 1}"}, "level": i % 2}
    for i in range(6)
]  # fmt: skip


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "saved"])
def test_any_data_set_by_its_columns(kind: str, tmp_path: Path) -> None:
    """The template has values of columns; other braces, of LaTeX say, are text."""
    source = tmp_path / "own"
    if kind == "saved":
        Dataset.from_list(OWN).save_to_disk(source)
    else:
        source = write(tmp_path, "own", OWN, kind)
    argv = ["--input", str(source), "--output", str(tmp_path / "out")]
    argv += ["--question-key", "nothing", "q", "--answer-key", "meta.gold"]
    argv += ["--answer-regex", r"A: (\d+)", "--keep", "level", "--system", "Be brief."]
    argv += ["--template", "Level {level}. {question} \\boxed{} {0}"]
    assert main(argv) == 0
    rows = rows_of(tmp_path / "out" / "train.jsonl")
    assert [row["answer"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert rows[3] == {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Level 1. How many are 3 and 1? \\boxed{} {0}"},
        ],
        "answer": "4", "source": "own", "level": 1,
    }  # fmt: skip


def test_values_of_csv_stay_text(tmp_path: Path) -> None:
    file = tmp_path / "codes.csv"
    file.write_text("question,answer\nCode of Ann?,007\nCode of Bo?,1e3\n")
    argv = ["--input", str(file), "--output", str(tmp_path), "--ask-boxed"]
    assert main(argv) == 0
    rows = rows_of(tmp_path / "train.jsonl")
    assert [row["answer"] for row in rows] == ["007", "1e3"]
    assert rows[0]["prompt"][0]["content"] == f"Code of Ann?\n{BOXED}"


def test_weights_take_what_there_is_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 3 to 1 and 12 and 8 rows: 12 of the first, 4 of the second."""
    for name, count in (("a", 12), ("b", 8)):
        rows = [{"question": f"{name}{i}", "answer": i} for i in range(count)]
        write(tmp_path, name, rows, ".jsonl")
    argv = ["--input", "3", str(tmp_path / "a.jsonl"), "1", str(tmp_path / "b.jsonl")]
    assert main([*argv, "--output", str(tmp_path / "out"), "--heldout", "2"]) == 0
    assert "20 rows, 0 repeated, 0 questions with several answers left out, 4 by the weights" in (
        capsys.readouterr().out
    )
    rows = rows_of(tmp_path / "out" / "train.jsonl") + rows_of(tmp_path / "out" / "heldout.jsonl")
    assert sorted(row["source"] for row in rows) == ["a"] * 12 + ["b"] * 4
    assert len({row["prompt"][0]["content"] for row in rows}) == 16


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--answer-key", "gold"], "own.jsonl:1: no text in gold; the columns are"),
        (["--answer-regex", "("], "--answer-regex '('"),
        (["--answer-regex", "x"], "put the answer into a group"),
        (["--answer-regex", "(zzz)"], "own.jsonl:1: --answer-regex '(zzz)' finds nothing"),
        (["--template", "{context}"], "no text in context"),
        (["--template", "@/nonexistent/file"], "--template @/nonexistent/file"),
        (["--keep", "answer"], "--keep answer: the output has its own"),
        (["--dataset", "gsm8k"], "no text in question"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "own", OWN, ".jsonl")
    argv = ["--input", str(file), "--output", str(tmp_path / "out"), "--question-key", "q"]
    assert main([*argv, "--answer-key", "meta.gold", *flags]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()
