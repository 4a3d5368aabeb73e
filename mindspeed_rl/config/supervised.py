"""Flags of the supervised entry, and the datasets of ``--data-path`` by the headers of their files.

Format of an index (.idx), little-endian: magic, version u64, code of the element type u8, number of
sequences u64, number of documents u64, lengths i32 each in tokens, byte offsets i64 each.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import Needs, flag

_WITH_SFT = Needs("--stage", ("sft",))


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
        "",
        "Data set of prompts and solutions, of the kinds of train_rl's --prompt-data. Required "
        "there.",
        needs=_WITH_SFT,
    )
    prompt_key: str = flag("prompt", "Field with the prompt: messages or text.", needs=_WITH_SFT)
    solution_key: str = flag(
        "solution", "Field with the text to learn; falls back to answer.", needs=_WITH_SFT
    )
    answer_key: str = flag("answer", "Field used where the solution is missing.", needs=_WITH_SFT)
    apply_chat_template: bool = flag(
        True,
        "Tokenise prompts as plain text, for a model without a chat template.",
        names=("--no-chat-template",),
        needs=_WITH_SFT,
    )
    shuffle: bool = flag(
        True,
        "Read the data in file order in every epoch.",
        names=("--no-shuffle",),
        needs=_WITH_SFT,
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


_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
# Code of the element type -> bytes of a token.
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


@dataclass(frozen=True, slots=True)
class Blend:
    """Prefixes of datasets and their weights; ``None``: weights in proportion to the sizes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(values: tuple[str, ...], flag: str = "--data-path") -> Blend:
    """Read a flag that takes data sets, or weights and data sets in turn, as Megatron does.

    Raises:
        UsageError: Some weights are no numbers, or are not positive.
    """
    if len(values) % 2 == 1:
        return Blend(values, None)
    numbers = [_number(text) for text in values[::2]]
    if all(number is None for number in numbers):
        return Blend(values, None)
    weights = tuple(number for number in numbers if number is not None and number > 0)
    if len(weights) < len(numbers):
        raise UsageError(
            f"{flag} {' '.join(values)}: must be data sets only, or a positive weight before each "
            "of them, like 30 a 70 b"
        )
    return Blend(values[1::2], weights)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_indexed_data(config: IndexedDataConfig, seq_length: int) -> None:
    """Check the flags of ``--stage pretrain`` and the files behind them.

    Raises:
        UsageError: The message names the flag, the value and the fix.
    """
    if not config.data_path:
        raise UsageError(
            "--data-path is required with --stage pretrain: give the prefix of a .bin and .idx file"
        )
    if seq_length < 1:
        raise UsageError("--seq-length is required with --stage pretrain: give the tokens of a row")
    shares = [_number(part) for part in config.split.split(",")]
    if len(shares) > 3 or any(s is None or s < 0 for s in shares) or not shares[0]:
        raise UsageError(
            f"--split {config.split}: must be up to three shares with commas between, the first "
            "(training) above 0, like 969,30,1"
        )
    for prefix in parse_blend(config.data_path).prefixes:
        data_bytes(prefix)


def data_bytes(prefix: str) -> int:
    """Number of bytes of a dataset's tokens.

    Raises:
        UsageError: A file is missing, is no index, or is not as long as its index says.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise UsageError(
                f"--data-path {prefix}: {path} is missing; give the path without .bin and .idx"
            )
    begin = len(_MAGIC) + _HEADER.size
    with index.open("rb") as file:
        head = file.read(begin)
        if len(head) < begin or not head.startswith(_MAGIC):
            raise UsageError(
                f"--data-path {prefix}: {index} is no index of Megatron's datasets; make it with "
                "its tools/preprocess_data.py"
            )
        _, code, num_sequences, num_documents = _HEADER.unpack(head[len(_MAGIC) :])
        if num_sequences < 1 or code not in _TOKEN_BYTES:
            raise UsageError(
                f"--data-path {prefix}: {index} has {num_sequences} sequences of element type "
                f"{code}; needed: at least one, of integers"
            )
        lengths_end = begin + 4 * num_sequences
        offsets_end = lengths_end + 8 * num_sequences
        whole = offsets_end + 8 * num_documents
        if index.stat().st_size < whole:
            raise UsageError(
                f"--data-path {prefix}: {index} has {index.stat().st_size} bytes, its header "
                f"implies {whole}; copy it again"
            )
        file.seek(lengths_end - 4)
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(offsets_end - 8)
        (last_offset,) = struct.unpack("<q", file.read(8))
    expected: int = last_offset + last_length * _TOKEN_BYTES[code]
    if data.stat().st_size < expected:
        raise UsageError(
            f"--data-path {prefix}: {data} has {data.stat().st_size} bytes, its index implies "
            f"{expected}; copy it again"
        )
    return expected
