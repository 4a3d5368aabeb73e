"""Supervised examples: a prompt, the response to imitate, and the border between them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.chat import PromptEncoder, check_token_ids, encode_texts
from mindspeed_rl.data.rows import DataRow, in_chunks, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SupervisedExample:
    """One sequence of supervised fine-tuning.

    Attributes:
        token_ids: Token ids of prompt and response, and the end-of-sequence token.
        num_prompt_tokens: Length of the prompt; the loss covers ``token_ids[num_prompt_tokens:]``
            and nothing else.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class SupervisedDataset:
    """The examples that are left after filtering, in file order; made by ``load_supervised``.

    Attributes:
        source: File name, as given.
        max_length: Length limit in tokens.
        num_filtered_long: Number of rows left out because they are longer than that.
        examples: All other rows.
    """

    source: str
    max_length: int
    num_filtered_long: int
    examples: Sequence[SupervisedExample]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over all examples in order: a resumed run must have the same ones."""
        content_hash = hashlib.sha256()
        for example in self.examples:
            content_hash.update(f"{example.num_prompt_tokens}:{example.token_ids}\n".encode())
        return content_hash.hexdigest()

    def report(self) -> str:
        """Return a line for the log: number of examples, and of those left out and why."""
        return (
            f"{self.source}: {len(self.examples)} of "
            f"{len(self.examples) + self.num_filtered_long} examples; "
            f"{self.num_filtered_long} left out, longer than --seq-length {self.max_length} tokens"
        )


def load_supervised(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    vocab_size: int,
    prompt_key: str = "prompt",
    solution_key: str = "solution",
    answer_key: str = "answer",
    apply_chat_template: bool = True,
    system_message: str = "",
) -> SupervisedDataset:
    """Load prompt and response pairs for supervised training, in file order.

    The prompt is tokenised exactly as ``load_prompts`` does it, the response on its own, so that
    the border between them is the one that sampling sees.

    Args:
        path: Name of the data set: see ``DataSource``.
        tokenizer: Tokenizer, which needs an end-of-sequence token.
        max_length: Length of the longest sequence kept, in tokens, end-of-sequence token included.
            Longer ones are left out and counted.
        vocab_size: Vocabulary size of the model; the ids of all rows must be below it.
        prompt_key: Column with a message list or a string.
        solution_key: Column with the response.
        answer_key: Column used in rows without a solution.
        apply_chat_template: Whether to render the prompt through the tokenizer's chat template.
        system_message: Text of a system message for prompts without one; empty: none.

    Raises:
        UsageError: the file or a row is broken (the message names the line), a prompt has no
            token, a token is outside the vocabulary, the tokenizer lacks an end-of-sequence token,
            or no example is left.
    """
    end = _end_token(tokenizer)
    encoder = PromptEncoder(tokenizer, prompt_key, apply_chat_template, system_message)
    examples: list[SupervisedExample] = []
    num_rows = 0
    for where, example in _examples(
        read_rows(path, "--sft-data"), encoder, end, solution_key, answer_key
    ):
        num_rows += 1
        # Checked apart: without a prompt token nothing predicts the first response token.
        for part in (slice(example.num_prompt_tokens), slice(example.num_prompt_tokens, None)):
            check_token_ids(where, example.token_ids[part], vocab_size)
        if len(example.token_ids) <= max_length:
            examples.append(example)
    num_filtered_long = num_rows - len(examples)
    if not examples:
        raise UsageError(
            f"{path}: none of {num_rows} rows is left: {num_filtered_long} are longer than "
            f"--seq-length {max_length} tokens; raise it or use another file"
        )
    return SupervisedDataset(str(path), max_length, num_filtered_long, examples)


def _end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    eos_token_id: int | None = tokenizer.eos_token_id
    if eos_token_id is None:
        raise UsageError(
            "the tokenizer has no eos_token_id, so a model trained on these examples could not "
            "learn to stop; set eos_token in its tokenizer_config.json"
        )
    return eos_token_id


def _examples(
    rows: Iterable[DataRow], encoder: PromptEncoder, end: int, solution_key: str, answer_key: str
) -> Iterator[tuple[str, SupervisedExample]]:
    for chunk in in_chunks(rows):
        prompts = encoder.encode([encoder.render(row) for row in chunk])
        texts = [_response_text(row, solution_key, answer_key) for row in chunk]
        responses = encode_texts(encoder.tokenizer, texts, add_special_tokens=False)
        for row, prompt, response in zip(chunk, prompts, responses, strict=True):
            yield row.where, SupervisedExample((*prompt, *response, end), len(prompt))


def _response_text(row: DataRow, solution_key: str, answer_key: str) -> str:
    if row.get(solution_key) is not None:
        return row.text(solution_key, "--solution-key")
    return row.text(answer_key, "--answer-key")
