"""What a run refuses in its model and data once they are read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mindspeed_rl.core.types import Prompt
from mindspeed_rl.rl.build import refuse_overlap, stop_token_ids


class Prompts(list[Prompt]):
    """A data set of these prompts."""

    def __init__(self, source: str, first_tokens: Sequence[int]) -> None:
        super().__init__(Prompt(i, (t, 9), f"text {t}", "") for i, t in enumerate(first_tokens))
        self.source = source


def test_held_out_prompts_must_not_be_trained_on() -> None:
    train = cast(Any, Prompts("train.jsonl", (1, 2, 3)))
    refuse_overlap(train, cast(Any, Prompts("heldout.jsonl", (4, 5))), "--eval-prompt-data")
    told = (
        r"--eval-prompt-data heldout\.jsonl: 2 of 3 prompts are also in --prompt-data train\.jsonl"
        r", e\.g\. 'text 2'; remove them"
    )
    with pytest.raises(ValueError, match=told):
        refuse_overlap(train, cast(Any, Prompts("heldout.jsonl", (4, 2, 3))), "--eval-prompt-data")


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
