"""What a run refuses in its model and data once they are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_rl.checkpoint.hf import load_hf
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.rl.build import refuse_overlap, stop_token_ids
from mindspeed_rl.weights.layouts.hf_file import HfFileLayout

Weights = dict[str, torch.Tensor]
NORM = "model.norm.weight"


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
    with pytest.raises(ValueError, match=r"names an end-of-sequence token, .*add one of them"):
        stop_ids((), None)
    told = r"end-of-sequence id 307 \(tokenizer: '<end>'\) is outside the vocabulary of 307"
    with pytest.raises(ValueError, match=told):
        stop_ids((1,), 307)


def without_norm(weights: Weights) -> None:
    del weights[NORM]


def short_norm(weights: Weights) -> None:
    weights[NORM] = weights[NORM][:-1].clone()


def more(weights: Weights) -> None:
    weights["adapter"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            without_norm,
            r"--hf-checkpoint .*: weights do not .*1 of \d+ tensors are missing: model\.norm",
        ),
        (short_norm, r"model\.norm\.weight has shape \(127,\), config\.json implies \(128,\)"),
        (more, r"--hf-checkpoint .*: weights do not match config\.json; 1 unknown: adapter"),
    ],
)
def test_weights_must_be_those_of_the_config(
    tiny_model: Path, tmp_path: Path, spoil: Callable[[Weights], None], told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    layout = HfFileLayout({n: tuple(w.shape) for n, w in weights.items()}, range(1))
    params = {name: torch.empty_like(w) for name, w in weights.items()}
    load_hf(folder, layout, 0, params)
    assert all(torch.equal(params[name], weights[name]) for name in weights)
    spoil(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=told):
        load_hf(folder, layout, 0, params)
