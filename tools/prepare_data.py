"""Makes --prompt-data from a downloaded file of a published data set.

usage: python tools/prepare_data.py --dataset gsm8k|deepscaler|dapo-math-17k --input FILE
                                    --output DIR [--heldout N]

Download the file yourself (nothing here reaches the network):
  gsm8k           openai/gsm8k: main/train-00000-of-00001.parquet, or train.jsonl
  deepscaler      agentica-org/DeepScaleR-Preview-Dataset: deepscaler.json
  dapo-math-17k   BytedTsinghua-SIA/DAPO-Math-17k: data/dapo-math-17k.parquet

It writes DIR/train.jsonl, and with --heldout DIR/heldout.jsonl. Repeated questions (the file of
dapo-math-17k has each about a hundred times) and questions with several answers are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_task_data import write_jsonl

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.rows import DataRow, read_rows

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Asks for the form of answer that the reward ``math`` looks for first."""
_GSM8K_ANSWER = re.compile(r"####\s*(\S[^\n]*)")
QuestionAnswer = tuple[str, str]  # a question in the words of the prompt, and its answer


def _text(row: DataRow, *keys: str) -> str:
    """Return the first text among some columns of a row.

    Raises:
        UsageError: No column holds text; the file is probably another data set's.
    """
    for key in keys:
        value = row.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise UsageError(
        f"{row.where}: no text in {' or '.join(keys)}; the columns are {sorted(row.values)}: is "
        "this the file of another data set?"
    )


def _gsm8k(row: DataRow) -> QuestionAnswer:
    """Read ``question``, and from ``answer`` the result after ``####``."""
    question, answer = _text(row, "question"), _text(row, "answer")
    found = _GSM8K_ANSWER.search(answer)
    if not found:
        raise UsageError(f"{row.where}: no '#### result' in the answer {answer[-60:]!r}")
    return f"{question}\n{BOXED}", found[1].strip().replace(",", "").lstrip("$")


def _deepscaler(row: DataRow) -> QuestionAnswer:
    """Read ``problem`` and ``answer``; the solution is left out."""
    return f"{_text(row, 'problem')}\n{BOXED}", _text(row, "answer")


def _dapo_math(row: DataRow) -> QuestionAnswer:
    """Read the only message, which asks for a form of answer, and ``reward_model.ground_truth``."""
    messages = row.get("prompt")
    if (
        not isinstance(messages, list)
        or len(messages) != 1
        or not isinstance(messages[0], Mapping)
        or not isinstance(messages[0].get("content"), str)
    ):
        raise UsageError(f"{row.where}: prompt is not a list of one message: {messages!r:.120}")
    return messages[0]["content"].strip(), _text(row, "reward_model.ground_truth")


PUBLISHED: Mapping[str, Callable[[DataRow], QuestionAnswer]] = {
    "gsm8k": _gsm8k,
    "deepscaler": _deepscaler,
    "dapo-math-17k": _dapo_math,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows to write, and counts of the rows and questions read.

    Attributes:
        train: Rows to train on.
        heldout: Rows to evaluate on; none of their questions is in ``train``.
        num_read: Number of rows of the file.
        num_repeated: Number of rows whose question came before.
        num_contradicting: Number of questions that have several answers; none of them is kept.
    """

    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    num_read: int
    num_repeated: int
    num_contradicting: int


def prepare(name: str, file: str | Path, num_heldout: int = 0) -> Prepared:
    """Read a downloaded file. Local.

    Args:
        name: Key of :data:`PUBLISHED`.
        file: File of type ``.parquet``, ``.json`` or ``.jsonl``.
        num_heldout: Number of questions to hold out. A hash of their text chooses them, so the
            order of the file does not matter.

    Raises:
        UsageError: The file is broken, is another data set's, or has too few questions.
    """
    answers: dict[str, set[str]] = {}
    num_read = 0
    for question, answer in map(PUBLISHED[name], read_rows(file)):
        num_read += 1
        answers.setdefault(question, set()).add(answer)
    kept = {q: next(iter(several)) for q, several in answers.items() if len(several) == 1}
    if not 0 <= num_heldout < len(kept):
        raise UsageError(
            f"--heldout {num_heldout}: {file} has {len(kept)} questions and at least one must be "
            f"left to train on; give 0 to {len(kept) - 1}"
        )
    held = set(sorted(kept, key=_hash)[:num_heldout])
    rows = {question: _row(name, question, answer) for question, answer in kept.items()}
    return Prepared(
        train=[row for question, row in rows.items() if question not in held],
        heldout=[row for question, row in rows.items() if question in held],
        num_read=num_read,
        num_repeated=num_read - len(answers),
        num_contradicting=len(answers) - len(kept),
    )


def _row(source: str, question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": answer,
        "source": source,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; return 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, choices=sorted(PUBLISHED))
    parser.add_argument("--input", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--heldout", type=int, default=0, help="questions to hold out (default 0)")
    given = parser.parse_args(argv)
    try:
        prepared = prepare(given.dataset, given.input, given.heldout)
        write_jsonl(given.output / "train.jsonl", prepared.train)
        if given.heldout:
            write_jsonl(given.output / "heldout.jsonl", prepared.heldout)
    except (UsageError, OSError) as error:  # OSError: --output cannot be written
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    print(
        f"{given.input}: {prepared.num_read} rows, {prepared.num_repeated} repeated, "
        f"{prepared.num_contradicting} questions with several answers left out; "
        f"{len(prepared.train)} to train on, {len(prepared.heldout)} held out in {given.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
