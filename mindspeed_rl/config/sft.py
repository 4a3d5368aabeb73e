"""Flags of the supervised entry: fine-tuning and pretraining."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class SftConfig:
    """Supervised fine-tuning.

    Trains on pairs of prompt and solution; the loss is on the solution alone. One step is one
    optimizer step on ``--global-batch-size`` pairs.
    """

    stage: str = flag(
        "sft",
        "What is learned: the solutions in --sft-data, or every token of --data-path.",
        choices=("sft", "pretrain"),
    )
    sft_data: str = flag(
        "", "File of prompts and solutions, jsonl or parquet. Required with --stage sft."
    )
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


@dataclass(frozen=True, slots=True)
class IndexedDataConfig:
    """Pretraining.

    ``--stage pretrain`` learns every token of Megatron's indexed datasets (.bin and .idx), in the
    rows and in the order that Megatron makes of ``--seed``, ``--seq-length`` and the samples of the
    run (``--train-iters`` x ``--global-batch-size``). As in Megatron's defaults documents follow
    each other in a row, and attention, positions and loss run across their borders.
    """

    data_path: tuple[str, ...] = flag(
        (),
        "Datasets without .bin and .idx: one prefix, several, or weights and prefixes in turn (30 "
        "a 70 b). Required with --stage pretrain.",
        nargs="*",
    )
    split: str = flag(
        "969,30,1",
        "Shares of the documents for training, validation and test; the first is trained on.",
    )
    data_cache_path: str = flag(
        "",
        "Folder for the indices of samples, seen by all nodes; empty takes PREFIX/cache beside "
        "the data.",
    )
