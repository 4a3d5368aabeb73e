"""Tokenised prompts are made once per node and shared; what is damaged is made again."""

from __future__ import annotations

import copy
import fcntl
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from make_tiny_model import build_tokenizer

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.locks import file_lock
from mindspeed_rl.data import prompts
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.chat import tokenizer_identity
from mindspeed_rl.data.prompts import PromptDataset, load_prompts

# Of the version before the cache, so that its checkpoints continue.
FINGERPRINT = "323c8a83554a29514c44afedfe4477eb1f80fb3167d4437ad2ab5237d1c9f706"
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "52"}], "answer": "25", "level": 3},
    {"prompt": "7 pears", "answer": 7.5, "metadata": {"tags": ["a"], "é": None}},
]
LONG = 20_000
TOKENIZER = build_tokenizer(["apples and pears"], 261)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PromptDataset]:
    def load_rows(
        rows: list[dict[str, Any]] = ROWS,
        tokenizer: Any = TOKENIZER,
        name: str = "a",
        **options: Any,
    ) -> PromptDataset:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        defaults = {"max_prompt_length": 64, "vocab_size": 261}
        cache = RowCache(str(tmp_path / "cache"))
        return load_prompts(path, tokenizer, **{"cache": cache, **defaults, **options})

    return load_rows


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*.arrow"))


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("tokenised again")


def test_the_fingerprint_is_that_of_earlier_versions(load: Any) -> None:
    assert load().fingerprint == FINGERPRINT == load().fingerprint


def test_prompts_are_tokenised_once(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load()
    monkeypatch.setattr(prompts, "read_rows", refused)
    again = load()
    assert list(first) == list(again) and first.report() == again.report()
    assert again[1].metadata == {"tags": ["a"], "é": None} and again[0].metadata == {"level": 3}
    (entry,) = entries(tmp_path)
    library = datasets.Dataset.from_file(str(entry))
    assert library["token_ids"][0] == list(first[0].token_ids)


def test_whatever_decides_the_tokens_has_an_entry_of_its_own(load: Any, tmp_path: Path) -> None:
    other_rules, other_template = copy.deepcopy(TOKENIZER), copy.deepcopy(TOKENIZER)
    other_rules.backend_tokenizer.normalizer = None
    other_rules.add_tokens(["pear"])
    other_template.chat_template = TOKENIZER.chat_template + "x"
    text = [{"prompt": "7", "answer": "7", "other": "8"}]
    variants: list[dict[str, Any]] = [
        {}, {"tokenizer": other_rules}, {"tokenizer": other_template}, {"max_prompt_length": 63},
        {"vocab_size": 260}, {"answer_key": "other"}, {"prompt_key": "other"},
        {"apply_chat_template": False}, {"rows": [*text, *text]},
    ]  # fmt: skip
    for count, variant in enumerate(variants, start=1):
        load(**{"rows": text, **variant})
        assert len(entries(tmp_path)) == count, variant
    load(text)
    assert len(entries(tmp_path)) == len(variants)


def test_an_entry_follows_the_content_not_the_time(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    monkeypatch.setattr(prompts, "read_rows", refused)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    load()
    changed = [{**ROWS[0], "answer": "26"}, ROWS[1]]  # as many bytes, at the same time
    with pytest.raises(AssertionError, match="tokenised again"):
        load(changed)


def test_a_template_with_the_date_is_rendered_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    dated = copy.deepcopy(TOKENIZER)
    dated.chat_template = "{{ strftime_now('%d') }}" + TOKENIZER.chat_template
    days = []
    for day in ("2026-01-02", "2026-01-03"):

        class Day:
            today = staticmethod(lambda day=day: type("D", (), {"isoformat": lambda self: day})())

        monkeypatch.setattr("mindspeed_rl.data.chat.date", Day)
        days.append((tokenizer_identity(TOKENIZER), tokenizer_identity(dated)))
    (plain, first), (plain_again, second) = days
    assert plain == plain_again and first != second


@pytest.mark.parametrize("damage", ["cut", "changed", "no description", "broken description"])
def test_a_damaged_entry_is_made_again(
    load: Any, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = list(load())
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(content[:-8])
    elif damage == "changed":
        place = content.index(b"7 pears")
        entry.write_bytes(content[:place] + b"8" + content[place + 1 :])
    else:
        description = entry.with_suffix(".json")
        description.unlink()
        if damage == "broken description":
            description.write_text("{")
    assert list(load()) == expected
    assert entry.read_bytes() == content
    told = capfd.readouterr().err
    assert ("is damaged" in told and str(entry) in told) == (damage != "no description")


def test_what_a_killed_process_left_is_removed(load: Any, tmp_path: Path) -> None:
    load()
    (entry,) = entries(tmp_path)
    left = entry.with_name(f".{entry.stem}.tmp-1.arrow")
    left.write_bytes(b"half")
    entry.with_suffix(".json").unlink()
    load()
    assert not left.exists()


def build_slowly(folder: str, barrier: Any, results: Any) -> None:
    """A rank that starts together with others."""

    def build(path: Path, on_rows: Callable[[int], None]) -> dict[str, Any]:
        with open(Path(folder, "builds"), "a") as file:
            file.write(f"{os.getpid()}\n")
        schema = pyarrow.schema([("x", pyarrow.int64())])
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as out:
            for row in range(5):
                out.write_batch(pyarrow.record_batch([[row + os.getpid()]], schema=schema))
                on_rows(row + 1)
                barrier_free.wait(0.05)
        return {"by": os.getpid()}

    barrier_free = multiprocessing.Event()
    barrier.wait()
    stored = RowCache(str(Path(folder, "cache"))).open("x", "00", build, "--flag v")
    results.put((stored.facts["by"], stored.table["x"].to_pylist()))


def test_of_many_processes_one_builds(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    barrier, results = spawn.Barrier(4), spawn.Queue()
    ranks = [
        spawn.Process(target=build_slowly, args=(str(tmp_path), barrier, results)) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    (builder,) = (tmp_path / "builds").read_text().split()
    assert found == [(int(builder), [int(builder) + row for row in range(5)])] * 4


def test_waiting_has_a_limit_and_shows_how_far_the_other_is(load: Any, tmp_path: Path) -> None:
    load()
    (entry,) = entries(tmp_path)
    entry.with_suffix(".json").unlink()
    with file_lock(Path(f"{entry.with_suffix('.json')}.lock"), 0.0, refused) as tell:
        tell("process 77, rows: 1024")
        cache = RowCache(str(tmp_path / "cache"), limit_s=0.3)
        told = r"--prompt-data .*a\.jsonl: .*process 77, rows: 1024.* 0.3 s \(--phase-timeout-s\)"
        with pytest.raises(UsageError, match=told):
            load(cache=cache)
    assert list(load(cache=cache))


def test_the_note_of_a_lock_is_that_of_its_holder(tmp_path: Path) -> None:
    notes: list[str] = []
    with file_lock(tmp_path / "lock", 1.0, refused) as tell:
        tell("a long first note")
        tell("second")
        with (
            pytest.raises(TimeoutError, match=r"^second$"),
            file_lock(tmp_path / "lock", 0.15, notes.append),
        ):
            raise AssertionError("held twice")
    assert set(notes) == {"second"}
    with (tmp_path / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_used_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--prompt-data .*file/x.*--prompt-cache-path"):
        load(cache=RowCache(str(tmp_path / "file" / "x")))


def test_a_mistake_in_the_data_leaves_no_entry(load: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match=r"a\.jsonl:3: .*--answer-key"):
            load([*ROWS, {"prompt": "1"}])
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def resident_kb(file: Path) -> int:
    """Memory of this process that the mappings of a file take."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(map(int, re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)))


def test_prompts_lie_in_the_file_not_in_the_memory_of_the_process(
    load: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": "x" * LONG, "answer": str(i)} for i in range(50)]
    load(rows, max_prompt_length=2 * LONG)
    before = pyarrow.total_allocated_bytes()
    dataset = load(rows, max_prompt_length=2 * LONG)
    (entry,) = entries(tmp_path)
    assert entry.stat().st_size > 50 * 5 * LONG
    assert pyarrow.total_allocated_bytes() - before < LONG
    for number in range(63):
        assert len(dataset.token_ids(number % 50)) == LONG + 2
    after_reading = resident_kb(entry)
    dataset.token_ids(7)  # the 64th gives back
    assert resident_kb(entry) < after_reading / 4
    assert dataset[49].text == "x" * LONG


def test_text_that_is_no_unicode_is_kept(load: Any) -> None:
    (row,) = load([{"prompt": "7", "answer": "\ud800", "note": "\udc00"}])
    assert (row.answer, row.metadata["note"]) == ("\ud800", "\udc00")
