"""The responses for drafts come back with a checkpoint, or are dropped with a line."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.full_disk import largest_file

from mindspeed_rl.rollout import saved_drafts
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.saved_drafts import FILE, restore_drafts, save_drafts

WORDS = {"a": 0, "b": 1}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_drafts.dist, "broadcast_object_list", lambda objects, source: None)


def run_with(
    history: DraftHistory | None,
    rank: int = 0,
    words: dict[str, int] = WORDS,
    vocab_size: int = 5,
) -> Any:
    lines: list[str] = []
    return SimpleNamespace(
        rollouts=SimpleNamespace(drafts=history),
        data=SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: words)),
        job=SimpleNamespace(
            world=SimpleNamespace(rank=rank),
            log_rank0=lines.append,
            plan=SimpleNamespace(spec=SimpleNamespace(vocab_size=vocab_size)),
        ),
        lines=lines,
    )


def filled() -> DraftHistory:
    history = DraftHistory(10_000)
    history.add(prompt_key((1, 2)), [3, 4])
    return history


def test_rank_0_saves_and_a_resumed_run_has_the_responses(tmp_path: Path) -> None:
    save_drafts(run_with(filled(), rank=1), str(tmp_path))
    assert not list(tmp_path.iterdir())
    save_drafts(run_with(filled()), str(tmp_path))
    run = run_with(DraftHistory(10_000))
    restore_drafts(run, str(tmp_path))
    assert list(map(list, run.rollouts.drafts.earlier(prompt_key((1, 2))))) == [[3, 4]]
    assert run.lines == []


def test_a_run_without_drafts_neither_writes_nor_reads(tmp_path: Path) -> None:
    save_drafts(run_with(None), str(tmp_path))
    assert not list(tmp_path.iterdir())
    (tmp_path / FILE).write_bytes(b"spoiled")
    run = run_with(None)
    restore_drafts(run, str(tmp_path))
    assert run.lines == []


def test_a_folder_without_the_file_begins_anew(tmp_path: Path) -> None:
    run = run_with(DraftHistory(10_000))
    restore_drafts(run, str(tmp_path))
    assert len(run.rollouts.drafts) == 0 and run.lines == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("cut", "corrupt"),
        ("larger", "limit of 10"),
        ("other tokenizer", "another tokenizer"),
        ("fewer tokens", "vocabulary of 4"),
    ],
)
def test_a_file_that_does_not_fit_is_dropped_with_a_line(
    tmp_path: Path, case: str, reason: str
) -> None:
    save_drafts(run_with(filled()), str(tmp_path))
    if case == "cut":
        path = tmp_path / FILE
        path.write_bytes(path.read_bytes()[:-1])
    history = DraftHistory(10 if case == "larger" else 10_000)
    words = {"b": 0, "a": 1} if case == "other tokenizer" else WORDS
    run = run_with(history, words=words, vocab_size=4 if case == "fewer tokens" else 5)
    restore_drafts(run, str(tmp_path))
    assert len(history) == 0
    (line,) = run.lines
    assert FILE in line and reason in line


def test_a_full_disk_is_told_with_the_flag(tmp_path: Path) -> None:
    save_drafts(run_with(filled()), str(tmp_path))
    before = (tmp_path / FILE).read_bytes()
    with (
        largest_file(16),
        pytest.raises(OSError, match=r"--save .*drafts\.bin.* make room") as told,
    ):
        save_drafts(run_with(filled()), str(tmp_path))
    assert told.value.errno == errno.EFBIG
    assert (tmp_path / FILE).read_bytes() == before and len(list(tmp_path.iterdir())) == 1
