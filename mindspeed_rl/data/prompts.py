"""The prompt data set of a run: checked, tokenised and length-filtered before the first step.

Everything that can be wrong with the data is found at start-up, with the file and line named, so
every prompt in the training loop fits.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.data.chat import PromptEncoder, check_token_ids
from mindspeed_rl.data.rows import DataRow, in_chunks, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt without its token ids; the fields are those of ``Prompt``."""

    text: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PromptDataset(Sequence[Prompt]):
    """The prompts that are left after filtering, in file order; made by ``load_prompts``.

    Token ids lie in one flat array (4 bytes each) and become a ``Prompt`` on access, since every
    rank of a node holds the whole set.

    Attributes:
        source: File name, as given.
        fingerprint: sha256 (hex) over token ids, answers and metadata of all prompts in order. A
            change of the file, tokenizer, chat template or limit that matters changes it.
        max_prompt_length: Length limit in tokens.
        num_filtered_long: Number of rows left out because their prompt is longer than that.
        questions: Text, answer and metadata of each prompt.
        flat_token_ids: Token ids of all prompts, one after the other.
        offsets: Prompt i has ``flat_token_ids[offsets[i]:offsets[i + 1]]``.
    """

    source: str
    fingerprint: str
    max_prompt_length: int
    num_filtered_long: int
    questions: Sequence[Question]
    flat_token_ids: array[int]
    offsets: array[int]

    def __len__(self) -> int:
        return len(self.questions)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        position = range(len(self))[index]
        question = self.questions[position]
        start, end = self.offsets[position], self.offsets[position + 1]
        return Prompt(
            index=position,
            token_ids=tuple(self.flat_token_ids[start:end]),
            text=question.text,
            answer=question.answer,
            metadata=question.metadata,
        )

    def report(self) -> str:
        """Return a line for the log: number of prompts, of those left out and why, and lengths."""
        lengths = [end - start for start, end in pairwise(self.offsets)]
        return (
            f"{self.source}: {len(self)} of {len(self) + self.num_filtered_long} prompts; "
            f"{self.num_filtered_long} left out, longer than --max-prompt-length "
            f"{self.max_prompt_length} tokens; prompt tokens min {min(lengths)}, "
            f"mean {sum(lengths) / len(lengths):.1f}, max {max(lengths)}"
        )


def load_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    vocab_size: int,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    apply_chat_template: bool = True,
    progress: bool = False,
) -> PromptDataset:
    """Load the prompts of a run; equal on every rank that reads the same file.

    A key may reach into nested objects: ``answer_key="reward_model.ground_truth"``.

    Args:
        path: A ``.jsonl``, ``.json`` or ``.parquet`` file.
        tokenizer: A ``transformers`` tokenizer; a fast one uses all cores.
        max_prompt_length: Length of the longest prompt kept, in tokens, chat template included.
        vocab_size: Vocabulary size of the model; the ids of all rows must be below it.
        prompt_key: Column with a list of ``{"role", "content"}`` messages or a string.
        answer_key: Column with the reference answer, a string or number.
        apply_chat_template: Whether to render prompts through the tokenizer's chat template with
            the generation prompt; off for base models with plain-text prompts.
        progress: Whether to show a bar on a terminal (one rank should).

    Raises:
        UsageError: the file is missing or broken; a row lacks its prompt or answer (the message
            names file, line and key), or has no token or one outside the vocabulary; or no prompt
            is left.
    """
    if max_prompt_length < 1:
        raise UsageError(f"--max-prompt-length {max_prompt_length}: give at least 1 token")
    encoder = PromptEncoder(tokenizer, prompt_key, apply_chat_template)
    questions: list[Question] = []
    flat_token_ids, offsets, content = array("i"), array("q", [0]), hashlib.sha256()
    num_filtered_long = 0
    for where, question, token_ids in _encoded_rows(path, encoder, answer_key, progress):
        check_token_ids(where, token_ids, vocab_size)
        if len(token_ids) > max_prompt_length:
            num_filtered_long += 1
            continue
        row = [token_ids, question.answer, question.metadata]
        content.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        questions.append(question)
        flat_token_ids.extend(token_ids)
        offsets.append(len(flat_token_ids))
    if not questions:
        raise UsageError(
            f"{path}: no prompt is left: {num_filtered_long} rows were read and all are longer "
            f"than --max-prompt-length {max_prompt_length} tokens; raise it or use another file"
        )
    return PromptDataset(
        source=str(path),
        fingerprint=content.hexdigest(),
        max_prompt_length=max_prompt_length,
        num_filtered_long=num_filtered_long,
        questions=questions,
        flat_token_ids=flat_token_ids,
        offsets=offsets,
    )


def _encoded_rows(
    path: str | Path, encoder: PromptEncoder, answer_key: str, progress: bool
) -> Iterator[tuple[str, Question, list[int]]]:
    from tqdm import tqdm

    with tqdm(desc="prompts", unit="row", delay=1, disable=None if progress else True) as bar:
        for rows in in_chunks(read_rows(path)):
            prompts = [encoder.render(row) for row in rows]
            questions = [
                Question(
                    prompt.text,
                    row.text(answer_key, "--answer-key"),
                    _metadata(row, encoder.prompt_key, answer_key),
                )
                for row, prompt in zip(rows, prompts, strict=True)
            ]
            places = [row.where for row in rows]
            yield from zip(places, questions, encoder.encode(prompts), strict=True)
            bar.update(len(rows))


def _metadata(row: DataRow, prompt_key: str, answer_key: str) -> dict[str, Any]:
    """Return the content of the column ``metadata``, on top of all other columns of the row."""
    nested = row.get("metadata")
    if nested is not None and not isinstance(nested, Mapping):
        raise UsageError(
            f"{row.where}: column 'metadata' holds {nested!r}, but an object is needed; "
            "rename the column: all other columns are metadata as they are"
        )
    named = (prompt_key, answer_key, "metadata")
    others = {key: value for key, value in row.values.items() if key not in named}
    return {**others, **(nested or {})}
