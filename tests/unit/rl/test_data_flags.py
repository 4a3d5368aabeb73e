"""Flags of data reach the loaders of both entries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_task_data import write_jsonl
from make_tiny_model import TinySizes, write_tiny_model

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.pretrain import load_examples
from mindspeed_rl.rl.build import load_data
from mindspeed_rl.rl.build_models import load_tokenizer

NOTHING: Any = None
SPEC: Any = SimpleNamespace(vocab_size=TinySizes().vocab_size)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has no chat template, and plain-text data."""
    folder = tmp_path_factory.mktemp("base")
    write_tiny_model(folder / "model")
    (folder / "model" / "chat_template.jinja").unlink()
    write_jsonl(folder / "train.jsonl", [{"prompt": "12", "answer": "3"}])
    return folder


def flags(folder: Path, *more: str) -> list[str]:
    return ["--hf-checkpoint", str(folder / "model"), *more]


def test_no_chat_template_in_rl(base_model: Path) -> None:
    argv = flags(base_model, "--prompt-data", str(base_model / "train.jsonl"))
    for more in ([], ["--no-chat-template"]):
        config = parse(RLRunConfig, [*argv, *more], "test").config
        tokenizer = load_tokenizer(config)
        if not more:
            with pytest.raises(ValueError, match="--no-chat-template"):
                load_data(config.prompts, tokenizer, SPEC, progress=False)
            continue
        prompts, held_out = load_data(config.prompts, tokenizer, SPEC, progress=False)
        assert prompts[0].token_ids == tuple(tokenizer.encode("12")) and held_out == {}


def test_no_chat_template_in_supervised_training(base_model: Path) -> None:
    argv = flags(base_model, "--sft-data", str(base_model / "train.jsonl"), "--seq-length", "9")
    config = parse(PretrainRunConfig, [*argv, "--no-chat-template"], "test").config
    job: Any = SimpleNamespace(config=config, plan=SimpleNamespace(spec=SPEC))
    (example,) = load_examples(job).examples
    assert example.num_prompt_tokens == 2
