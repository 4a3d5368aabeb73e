"""Data sets of every kind hold the same prompts; several become one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow.parquet
import pytest
from make_tiny_model import build_tokenizer

from mindspeed_rl.config import PromptConfig
from mindspeed_rl.core import locks
from mindspeed_rl.core.data_source import DataSource
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.library import library_rows, local_place
from mindspeed_rl.data.prompts import PromptDataset, blend, load_prompts
from mindspeed_rl.data.rows import read_rows

ROWS = [
    {"prompt": "1 apple", "answer": "007", "level": "3"},
    {"prompt": 'two "apples",\nand a pear', "answer": "NA", "level": ""},
    {"prompt": "3", "answer": "1.50", "level": "x"},
]
OTHER = [{"prompt": "9", "answer": "81", "level": "no"}]
REVISION = "ab" * 20


def write_jsonl(path: Path, rows: Iterable[Any] = ROWS) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def json_file(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return str(folder / "rows.json")


def parquet_file(folder: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def csv_file(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).to_csv(folder / "rows.csv")
    return str(folder / "rows.csv")


def saved_folder(folder: Path) -> str:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


def arrow_file(folder: Path) -> str:
    return str(next(Path(saved_folder(folder)).glob("*.arrow")))


def saved_splits(folder: Path) -> str:
    parts = {"train": OTHER, "hard": ROWS}
    sets = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(sets).save_to_disk(folder / "splits")
    return f"{folder / 'splits'}:hard"


def folder_of_files(folder: Path) -> str:
    write_jsonl(folder / "files" / "test.jsonl", OTHER)
    write_jsonl(folder / "files" / "train.jsonl")
    return str(folder / "files")


KINDS: dict[str, Callable[[Path], str]] = {
    f.__name__: f
    for f in (json_file, parquet_file, csv_file, saved_folder, arrow_file, saved_splits,
              folder_of_files)
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_rows(kind: str, tmp_path: Path) -> None:
    name = KINDS[kind](tmp_path)
    rows = list(read_rows(name, "--prompt-data"))
    assert [dict(row.values) for row in rows] == ROWS
    assert rows[1].where == f"{name}, row 1 (counted from 0)"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine that downloaded org/sums at two revisions; there is no network."""
    place = tmp_path / "hub" / "datasets--org--sums"
    for revision, rows in (("main", OTHER), ("v2", ROWS)):
        commit = REVISION if revision == "v2" else "cd" * 20
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / revision).write_text(commit)
        snapshot = place / "snapshots" / commit
        write_jsonl(snapshot / "easy" / "train.jsonl", OTHER)
        write_jsonl(snapshot / "hard" / "test.jsonl", rows)
        write_jsonl(snapshot / "hard" / "train.jsonl", OTHER)
        configs = "".join(f"- config_name: {c}\n  data_dir: {c}\n" for c in ("easy", "hard"))
        (snapshot / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return place


@pytest.mark.parametrize(
    ("name", "rows"),
    [("@v2:hard/test", ROWS), (f"@{REVISION}:hard/test", ROWS), (":hard/test", OTHER),
     ("@v2:hard/train", OTHER)],
)  # fmt: skip
def test_the_hub_by_revision_subset_and_split(hub: Path, name: str, rows: list[Any]) -> None:
    assert [dict(row.values) for row in read_rows(f"org/sums{name}")] == rows


@pytest.mark.parametrize(
    ("name", "told"),
    [("org/sums@v3", "cannot be had"),
     ("org/none", "hub's cache .*hf download org/none --repo-type dataset`"),
     ("org/sums@v2:hard/dev", r"'dev' is not among test, train.*org/sums@v2:hard/test"),
     ("org/sums@v2:soft/test", "soft")],
)  # fmt: skip
def test_what_the_hub_does_not_have_is_named(hub: Path, name: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"--prompt-data {name}: .*{told}"):
        list(read_rows(name, "--prompt-data"))


def test_of_ranks_that_start_together_one_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other waits, and then looks at the cache alone."""
    waits, asked = threading.Event(), []

    def snapshot(
        place: str,
        *,
        repo_type: str,
        revision: str,
        local_files_only: bool,
        allow_patterns: object,
    ) -> str:
        assert allow_patterns is None
        asked.append(local_files_only)
        assert local_files_only or waits.wait(30)
        return f"{place}/{repo_type}/{revision}"

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: waits.set())
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    source = DataSource("org/sums@v2", "org/sums", True, "v2")
    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(lambda _: local_place(source, "--prompt-data"), range(2)))
    assert found == [Path("org/sums/dataset/v2")] * 2
    assert asked == [False, True]


def test_splits_of_folders(tmp_path: Path) -> None:
    saved_splits(tmp_path)
    splits = tmp_path / "splits"
    assert [dict(row.values) for row in read_rows(splits)] == OTHER
    with pytest.raises(UsageError, match=rf"{splits}:dev: .*'dev'.* hard, train; .*{splits}:hard"):
        list(read_rows(f"{splits}:dev"))
    with pytest.raises(UsageError, match="without splits"):
        list(read_rows(f"{saved_folder(tmp_path)}:dev"))


def test_names_of_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b@c").mkdir()
    write_jsonl(tmp_path / "org" / "rows.jsonl")
    parse = DataSource.parse
    assert parse("a:b@c", "f") == DataSource("a:b@c", "a:b@c")
    assert parse("org/rows.jsonl", "f").on_hub is False
    assert parse("org:dev", "f") == DataSource("org:dev", "org", split="dev")
    name = "org/name@v1.0:main/test"
    assert parse(name, "f") == DataSource(name, "org/name", True, "v1.0", "main", "test")
    for wrong in ("none.jsonl", "org/none.jsonl", "none", "org/x:", "org/x@", "/no/x", "a/b/c",
                  "org/rows.jsonl:train"):  # fmt: skip
        with pytest.raises(UsageError, match=f"--flag {wrong}: no such file or folder; give"):
            parse(wrong, "--flag")


@pytest.mark.parametrize(
    ("given", "prefixes", "weights"),
    [
        ("a.jsonl", ("a.jsonl",), None),
        ("a.jsonl b.csv", ("a.jsonl", "b.csv"), None),
        ("0.5 a.jsonl 2 b.csv", ("a.jsonl", "b.csv"), (0.5, 2.0)),
    ],
)
def test_several_data_sets_by_flag(given: str, prefixes: Any, weights: Any) -> None:
    found = PromptConfig(prompt_data=tuple(given.split())).blend
    assert (found.prefixes, found.weights) == (prefixes, weights)


@pytest.mark.parametrize("given", ["0 a 1 b", "1 a b c"])
def test_weights_must_be_positive_and_of_every_data_set(given: str) -> None:
    with pytest.raises(UsageError, match=f"--prompt-data {given}: .*30 a 70 b"):
        _ = PromptConfig(prompt_data=tuple(given.split())).blend


def load(folder: Path, name: str, size: int, **columns: str) -> PromptDataset:
    rows = [{"prompt": f"{name}{i}", "answer": str(i), **columns} for i in range(size)]
    return load_prompts(
        write_jsonl(folder / f"{name}.jsonl", rows),
        build_tokenizer(["apples and pears"], 261),
        max_prompt_length=4,
        vocab_size=261,
        cache=RowCache(str(folder / "cache")),
    )


def test_without_weights_an_epoch_has_every_prompt_once(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", 2), load(tmp_path, "b", 12, color="red")
    both = blend([a, b])
    texts = [f"a{i}" for i in range(2)] + [f"b{i}" for i in range(10)]  # b10 is too long
    assert [prompt.text for prompt in both] == texts
    assert [prompt.index for prompt in both] == list(range(12))
    assert both[5].metadata == {"color": "red"} and both[0].metadata == {}
    assert both.metadata_keys == {"color"} and both.num_filtered_long == 2
    assert both.fingerprint != blend([b, a]).fingerprint != b.fingerprint
    assert "12 of 14 prompts; 2 left out" in both.report()
    assert blend([a]) is a


def test_weights_are_shares_of_an_epoch(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", 8), load(tmp_path, "b", 5)
    both = blend([a, b], [1.0, 3.0])
    seen = Counter(prompt.text for prompt in both)
    assert sum(n for text, n in seen.items() if text[0] == "a") == 8
    assert sum(n for text, n in seen.items() if text[0] == "b") == 24
    assert {seen[f"a{i}"] for i in range(8)} == {1}
    assert sorted(seen[f"b{i}"] for i in range(5)) == [4, 5, 5, 5, 5]
    assert both.fingerprint != blend([a, b], [1.0, 2.0]).fingerprint
    assert len(both) == 32 and both[31].token_ids == b[4].token_ids
    assert list(both.num_tokens()) == [len(prompt.token_ids) for prompt in both]
    assert len(list(both.questions())) == 13
    assert "13 of 13 prompts; 32 in an epoch" in both.report()


def test_weights_that_make_an_endless_epoch_are_refused(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", 8), load(tmp_path, "b", 5)
    with pytest.raises(ValueError, match=r"--prompt-data: .* 8008 prompts, more than 100 times"):
        blend([a, b], [0.001, 1.0])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id,prompt,answer\n1,What is 1 + 1?,2,x\n", "first row 4 fields"),
        ("prompt,prompt\nq,a\n", "columns prompt, prompt"),
    ],
)
def test_a_csv_whose_fields_would_shift_is_refused(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "shifted.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        list(library_rows(DataSource.parse(str(file), "--prompt-data"), "--prompt-data"))


def test_values_of_csv_files_in_a_folder_are_text(tmp_path: Path) -> None:
    """As those of a single file: no number, and nothing missing, in every split."""
    (tmp_path / "train.csv").write_text("prompt,answer\nq,007\nr,NA\n")
    (tmp_path / "test.csv").write_text("prompt,answer\ns,1.50\n")
    (tmp_path / "README.md").write_text("A table.")
    for split, answers in (("train", ["007", "NA"]), ("test", ["1.50"])):
        rows = read_rows(f"{tmp_path}:{split}")
        assert [row.text("answer", "--answer-key") for row in rows] == answers


def test_csv_files_in_a_folder_may_differ_in_their_columns_by_split(tmp_path: Path) -> None:
    """Then the library reads them as it does."""
    (tmp_path / "train.csv").write_text("prompt,answer\nq,a\n")
    (tmp_path / "test.csv").write_text("prompt,answer,level\ns,b,3\n")
    assert [dict(row.values) for row in read_rows(f"{tmp_path}:test")] == [
        {"prompt": "s", "answer": "b", "level": 3}
    ]


def test_a_csv_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """As Excel writes it."""
    file = tmp_path / "excel.csv"
    file.write_text("prompt,answer\nq,007\n", encoding="utf-8-sig")
    source = DataSource.parse(str(file), "--prompt-data")
    assert list(library_rows(source, "--prompt-data")) == [{"prompt": "q", "answer": "007"}]
