"""Flags of the supervised entry."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.flag import flag


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Supervised fine-tuning.

    Trains on pairs of prompt and solution; the loss is on the solution alone. One step is one
    optimizer step on ``--global-batch-size`` pairs.
    """

    stage: str = flag("sft", "Kind of supervised training.", choices=("sft",))
    sft_data: str = flag("", "File of prompts and solutions, jsonl or parquet. Required.")
    prompt_key: str = flag("prompt", "Field with the prompt: messages or text.")
    solution_key: str = flag("solution", "Field with the text to learn; falls back to answer.")
    answer_key: str = flag("answer", "Field used where the solution is missing.")
    apply_chat_template: bool = flag(
        True,
        "Tokenise prompts as plain text, for a model without a chat template.",
        names=("--no-chat-template",),
    )
    shuffle: bool = flag(
        True, "Read the data in file order in every epoch.", names=("--no-shuffle",)
    )
