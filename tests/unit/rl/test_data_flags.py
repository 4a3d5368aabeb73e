"""Flags of data and of resuming reach the loaders of both entries."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_task_data import write_jsonl
from make_tiny_model import TinySizes, write_tiny_model

from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.config.arguments import parse
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.pretrain import load_examples
from mindspeed_rl.rl import checkpoints
from mindspeed_rl.rl import resume as rl_resume
from mindspeed_rl.rl.build import load_data
from mindspeed_rl.rl.build_models import load_tokenizer
from mindspeed_rl.rl.components import Models
from mindspeed_rl.trainer.checkpoint import LoadedState

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
            with pytest.raises(ValueError, match=r"has no chat template; .*--no-chat-template"):
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


@pytest.mark.parametrize("allowed", [False, True])
def test_changed_data_in_rl(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    argv = ["--allow-changed-data"] if allowed else []
    saved = PromptSampler(8, seed=1, fingerprint="old")
    saved.next(3)
    extra = {"sampler": saved.state_dict(), "version": 2, "report": {}}
    monkeypatch.setattr(checkpoints, "load", lambda job, engine, more: LoadedState(4, extra))
    monkeypatch.setattr(rl_resume, "RunReporter", lambda run, state, step, told: (step, told))
    sampler = PromptSampler(8, seed=1, fingerprint="new")
    run: Any = SimpleNamespace(
        config=parse(RLRunConfig, argv, "test").config,
        job=None,
        models=Models(NOTHING),
        scheduler=SimpleNamespace(
            require=lambda phase, what: None, onloaded=lambda *owners: nullcontext()
        ),
        data=SimpleNamespace(sampler=sampler),
    )
    if not allowed:
        with pytest.raises(ValueError, match=r"fingerprint .*add --allow-changed-data"):
            rl_resume.start(run)
        return
    state, report = rl_resume.start(run)
    assert report == (4, {}) and state.version == 2
    assert not state.carried_groups and sampler.state_dict()["epoch"] == 1
