"""Flags of data reach the loaders of both entries."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_task_data import write_jsonl
from make_tiny_model import TinySizes, write_tiny_model

from mindspeed_rl.building.models import load_tokenizer
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.pretrain import load_examples
from mindspeed_rl.rl.build import check_data, load_data
from mindspeed_rl.rl.components import PromptData

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
    cache = RowCache(str(base_model / "cache"))
    argv = flags(base_model, "--prompt-data", str(base_model / "train.jsonl"))
    for more in ([], ["--no-chat-template"]):
        config = parse(RLRunConfig, [*argv, *more], "test").config
        tokenizer = load_tokenizer(config)
        if not more:
            with pytest.raises(ValueError, match="--no-chat-template"):
                load_data(config.prompts, tokenizer, SPEC, cache)
            continue
        prompts, held_out = load_data(config.prompts, tokenizer, SPEC, cache)
        assert prompts[0].token_ids == tuple(tokenizer.encode("12")) and held_out == {}


def test_no_chat_template_in_supervised_training(base_model: Path) -> None:
    argv = flags(base_model, "--sft-data", str(base_model / "train.jsonl"), "--seq-length", "9")
    config = parse(PretrainRunConfig, [*argv, "--no-chat-template"], "test").config
    job: Any = SimpleNamespace(config=config, plan=SimpleNamespace(spec=SPEC))
    (example,) = load_examples(job).examples
    assert example.num_prompt_tokens == 2


def test_several_data_sets_and_their_weights_reach_the_run(base_model: Path) -> None:
    write_jsonl(base_model / "more.jsonl", [{"prompt": f"{n}", "answer": "1"} for n in (5, 6)])
    train, more = str(base_model / "train.jsonl"), str(base_model / "more.jsonl")
    argv = flags(base_model, "--no-chat-template", "--eval-prompt-data", more)
    cache = RowCache(str(base_model / "cache"))
    for given, texts in (
        ([train, more], ["12", "5", "6"]),
        (["0.8", train, "0.2", more], ["12"] * 8 + ["5", "6"]),
    ):
        config = parse(RLRunConfig, [*argv, "--prompt-data", *given], "test").config
        tokenizer = load_tokenizer(config)
        prompts, held_out = load_data(config.prompts, tokenizer, SPEC, cache)
        assert [prompt.text for prompt in prompts] == texts
        assert [prompt.text for prompt in held_out[""]] == ["5", "6"]
        with pytest.raises(UsageError, match=r"--eval-prompt-data .* 2 of 2 prompts"):
            check_data(config, PromptData(tokenizer, prompts, held_out))
        allowed = parse(RLRunConfig, [*argv, "--eval-may-overlap", "--prompt-data", *given], "test")
        check_data(allowed.config, PromptData(tokenizer, prompts, held_out))


def test_rewards_that_a_row_names_must_be_those_of_the_run(base_model: Path) -> None:
    argv = flags(base_model, "--no-chat-template", "--reward-function", "math")
    for name, allowed in (("math", True), ("code", False)):
        file = base_model / f"{name}.jsonl"
        write_jsonl(file, [{"prompt": "12", "answer": "3", "rewards": name}])
        config = parse(RLRunConfig, [*argv, "--prompt-data", str(file)], "test").config
        tokenizer = load_tokenizer(config)
        cache = RowCache(str(base_model / "cache"))
        data = PromptData(tokenizer, *load_data(config.prompts, tokenizer, SPEC, cache))
        with nullcontext() if allowed else pytest.raises(UsageError, match=r"code.*--reward-key"):
            check_data(config, data)


def test_an_order_by_length_needs_more_prompts_than_a_step(base_model: Path) -> None:
    file = base_model / "four.jsonl"
    write_jsonl(file, [{"prompt": f"{n}", "answer": "1"} for n in (1, 2, 3, 4)])
    argv = flags(base_model, "--no-chat-template", "--prompt-data", str(file))
    for per_step, order, refused in ((3, "by-length", False), (4, "by-length", True),
                                     (4, "shuffled", False)):  # fmt: skip
        own = ["--grpo-prompts-per-step", str(per_step), "--prompt-order", order]
        config = parse(RLRunConfig, [*argv, *own], "test").config
        tokenizer = load_tokenizer(config)
        cache = RowCache(str(base_model / "cache"))
        data = PromptData(tokenizer, *load_data(config.prompts, tokenizer, SPEC, cache))
        with pytest.raises(UsageError, match="--prompt-order") if refused else nullcontext():
            check_data(config, data)
