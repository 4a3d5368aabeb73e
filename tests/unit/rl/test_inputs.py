"""What a run refuses in its model and data once they are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from make_tiny_model import build_tokenizer

from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.prompts import PromptDataset, load_prompts
from mindspeed_rl.rl.build import refuse_overlap, stop_token_ids


def prompts(file: Path, questions: Sequence[str]) -> PromptDataset:
    file.write_text("".join(json.dumps({"prompt": q, "answer": "1"}) + "\n" for q in questions))
    tokenizer, cache = build_tokenizer(["a"], 261), RowCache(str(file.parent / "cache"))
    return load_prompts(file, tokenizer, max_prompt_length=16, vocab_size=261, cache=cache)


def test_held_out_prompts_must_not_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are compared, so neither tokens nor texts of all prompts are made objects."""
    train = prompts(tmp_path / "train.jsonl", ["text 1", "text 2", "text 3"])
    apart = prompts(tmp_path / "apart.jsonl", ["text 4", "text 12"])
    held_out = prompts(tmp_path / "heldout.jsonl", ["text 4", "text 2", "text 3"])
    monkeypatch.setattr(PromptDataset, "__getitem__", None)
    monkeypatch.setattr(PromptDataset, "token_ids", None)
    refuse_overlap(train, apart, "--eval-prompt-data")
    told = (
        r"--eval-prompt-data .*heldout\.jsonl: 2 of 3 prompts are also in --prompt-data "
        r".*train\.jsonl, e\.g\. 'text 2'; remove them"
    )
    with pytest.raises(ValueError, match=told):
        refuse_overlap(train, held_out, "--eval-prompt-data")


def stop_ids(model: tuple[int, ...], tokenizer: int | None) -> tuple[int, ...]:
    spec = SimpleNamespace(eos_token_ids=model, vocab_size=307)
    return stop_token_ids(
        cast(Any, SimpleNamespace(eos_token_id=tokenizer, eos_token="<end>")),
        cast(Any, SimpleNamespace(spec=spec)),
    )


def test_a_response_ends_at_the_tokens_of_model_and_tokenizer() -> None:
    assert stop_ids((5, 1), 306) == (1, 5, 306)
    assert stop_ids((), 4) == (4,)
    assert stop_ids((4,), None) == (4,)


def test_a_run_needs_an_end_token_within_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="end-of-sequence"):
        stop_ids((), None)
    told = r"307 .*'<end>'.* 307"
    with pytest.raises(ValueError, match=told):
        stop_ids((1,), 307)
