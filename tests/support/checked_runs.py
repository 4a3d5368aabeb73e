"""Folders and command lines as far as the checks before a start look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.planning.run_plan import RLPlan, RunPlan, plan_pretrain, plan_rl

SMALL_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 307,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CLASSIFIER = {
    "architectures": ["Qwen2ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "tie_word_embeddings": True,
}

Run = TypeVar("Run", RLRunConfig, PretrainRunConfig, ScoreRunConfig)
WORLD = 8


def write_model(folder: Path, **changes: Any) -> Path:
    """A model: its configuration, empty weights and an empty tokenizer."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN2 | changes))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def configured(run_type: type[Run], flags: str) -> Run:
    """The configuration of a command line."""
    return parse(run_type, flags.split(), "test").config


def plan_of_models(
    folder: Path, flags: str, models: dict[str, dict[str, Any]]
) -> tuple[RLRunConfig, RLPlan]:
    """A run of 4 ranks on the model ``policy``; the others are ``DIR/NAME`` in the flags.

    Args:
        folder: Where the models and the data are written.
        flags: Flags of the run beside its model, data and layout.
        models: What of the configuration of each model is changed.
    """
    for name, changed in models.items():
        write_model(folder / name, **changed)
    (folder / "rl.jsonl").touch()
    words = (
        f"--hf-checkpoint {folder}/policy --prompt-data {folder}/rl.jsonl --train-iters 4 "
        "--max-prompt-length 16 --rollout-max-response-length 16 --platform cpu "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --rollout-tp 2 "
        f"--output-dir {folder}/out "
    )
    config = configured(RLRunConfig, words + flags.replace("DIR", str(folder)))
    return config, plan_rl(config, 4)


def write_inputs(folder: Path) -> Path:
    """A model and data files as the two functions below name them."""
    write_model(folder / "model")
    for name in ("rl.jsonl", "eval.jsonl", "sft.jsonl"):
        (folder / name).write_text("{}\n")
    return folder


def check_rl_run(
    folder: Path, flags: str = "", steps: str = "--train-iters 3", **arguments: bool
) -> RLPlan:
    """Check a valid run of 8 ranks with further flags, of which the last one counts."""
    valid = (
        f"--hf-checkpoint {folder}/model --prompt-data {folder}/rl.jsonl --rollout-tp 4 "
        f"--output-dir {folder}/fresh --max-prompt-length 64 --rollout-max-response-length 64 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--grpo-prompts-per-step 4 --grpo-group-size 4 {steps} "
    )
    return plan_rl(configured(RLRunConfig, valid + flags), WORLD, **arguments)


def check_pretrain_run(
    folder: Path, flags: str = "", steps: str = "--train-iters 3", **arguments: bool
) -> RunPlan:
    """As :func:`check_rl_run`, of a supervised run."""
    valid = (
        f"--hf-checkpoint {folder}/model --sft-data {folder}/sft.jsonl {steps} "
        "--tensor-model-parallel-size 2 --global-batch-size 8 "
    )
    return plan_pretrain(configured(PretrainRunConfig, valid + flags), WORLD, **arguments)
