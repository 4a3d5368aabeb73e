"""Converts a published data set, or any other whose columns you name, to rows for --prompt-data.

usage: python tools/prepare_data.py --dataset gsm8k|deepscaler|dapo-math-17k --input FILE
                                    --output DIR [--heldout N]
       python tools/prepare_data.py --input DATA [DATA ...] --question-key COLUMN
                                    --answer-key COLUMN --output DIR [--template TEXT] ...

DATA is what --prompt-data takes: a .json, .jsonl, .csv, .parquet or .arrow file, a folder of them
or of `save_to_disk`, or a data set of the hub (ORG/NAME@REVISION:SPLIT), which is downloaded with
HF_HUB_OFFLINE=0. With a weight before each, as many rows are taken of each as the weights allow
without repeating a row. A column within an object is written with dots: reward_model.ground_truth.

Published data sets have to be downloaded first:
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needs_environment  # noqa: F401
from make_task_data import write_jsonl

from mindspeed_rl.config.supervised import parse_blend
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.rows import DataRow, read_rows

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Asks for the form of answer that the reward ``math`` looks for first."""
_GSM8K_ANSWER = re.compile(r"####\s*(\S[^\n]*)")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question in the words of the prompt, and what a row of the output has besides it.

    Attributes:
        text: User message.
        answer: Reference answer.
        kept: NamedColumns that rewards get as metadata, by name.
    """

    text: str
    answer: str
    kept: Mapping[str, Any] = field(default_factory=dict)


Reader = Callable[[DataRow], PreparedQuestion]


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


def _gsm8k(row: DataRow) -> PreparedQuestion:
    """Read ``question``, and from ``answer`` the result after ``####``."""
    question, answer = _text(row, "question"), _text(row, "answer")
    found = _GSM8K_ANSWER.search(answer)
    if not found:
        raise UsageError(f"{row.where}: no '#### result' in the answer {answer[-60:]!r}")
    return PreparedQuestion(f"{question}\n{BOXED}", found[1].strip().replace(",", "").lstrip("$"))


def _deepscaler(row: DataRow) -> PreparedQuestion:
    """Read ``problem`` and ``answer``; the solution is left out."""
    return PreparedQuestion(f"{_text(row, 'problem')}\n{BOXED}", _text(row, "answer"))


def _dapo_math(row: DataRow) -> PreparedQuestion:
    """Read the only message, which asks for a form of answer, and ``reward_model.ground_truth``."""
    messages = row.get("prompt")
    if (
        not isinstance(messages, list)
        or len(messages) != 1
        or not isinstance(messages[0], Mapping)
        or not isinstance(messages[0].get("content"), str)
    ):
        raise UsageError(f"{row.where}: prompt is not a list of one message: {messages!r:.120}")
    return PreparedQuestion(messages[0]["content"].strip(), _text(row, "reward_model.ground_truth"))


PUBLISHED: Mapping[str, Reader] = {
    "gsm8k": _gsm8k,
    "deepscaler": _deepscaler,
    "dapo-math-17k": _dapo_math,
}


@dataclass(frozen=True, slots=True)
class NamedColumns:
    """Reads the rows of any data set by the names of its columns.

    Attributes:
        questions: NamedColumns of the question, of which the first that a row has is taken.
        answers: NamedColumns of the answer, likewise.
        template: Text of the prompt with ``{column}`` in place of values, ``{question}`` for the
            question; braces around anything else are text.
        pattern: Regular expression whose first group in the answer is the answer; ``None``: all of
            it is.
        kept: NamedColumns to keep.
    """

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    template: str = "{question}"
    pattern: re.Pattern[str] | None = None
    kept: tuple[str, ...] = ()

    def __call__(self, row: DataRow) -> PreparedQuestion:
        """Read a row.

        Raises:
            UsageError: A column that is needed is missing, or the pattern is not in the answer.
        """
        question, answer = _text(row, *self.questions), _text(row, *self.answers)
        if self.pattern is not None:
            found = self.pattern.search(answer)
            if not found or not (found[1] or "").strip():
                raise UsageError(
                    f"{row.where}: --answer-regex {self.pattern.pattern!r} finds nothing in the "
                    f"answer {answer[-60:]!r}"
                )
            answer = found[1].strip()

        def value(match: re.Match[str]) -> str:
            return question if match[1] == "question" else _text(row, match[1])

        kept = {name: row.get(name) for name in self.kept if row.get(name) is not None}
        return PreparedQuestion(_PLACEHOLDER.sub(value, self.template), answer, kept)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows to write, and counts of the rows and questions read.

    Attributes:
        train: Rows to train on.
        heldout: Rows to evaluate on; none of their questions is in ``train``.
        num_read: Number of rows of the data sets.
        num_repeated: Number of rows whose question came before.
        num_contradicting: Number of questions that have several answers; none of them is kept.
        num_unweighted: Number of questions left out so that the weights hold.
    """

    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    num_read: int
    num_repeated: int
    num_contradicting: int
    num_unweighted: int = 0


def prepare(name: str, file: str | Path, num_heldout: int = 0) -> Prepared:
    """Read a downloaded file of a published data set. Local.

    Args:
        name: Key of :data:`PUBLISHED`.
        file: File of type ``.parquet``, ``.json`` or ``.jsonl``.
        num_heldout: See :func:`prepare_all`.

    Raises:
        UsageError: The file is broken, is another data set's, or has too few questions.
    """
    return prepare_all({name: str(file)}, PUBLISHED[name], num_heldout)


def prepare_all(
    sources: Mapping[str, str],
    read: Reader,
    num_heldout: int = 0,
    weights: Sequence[float] | None = None,
    system: str = "",
) -> Prepared:
    """Read data sets. Local.

    Args:
        sources: Data sets by the name that their rows get as ``source``. A question of several is
            that of the first.
        read: Reads a row.
        num_heldout: Number of questions to hold out. A hash of their text chooses them, so the
            order of the rows does not matter.
        weights: Share of each data set in the output, up to a factor; ``None``: all rows of all.
        system: System message of every prompt; empty: none.

    Raises:
        UsageError: A data set is broken or lacks a column, or there are too few questions.
    """
    found: dict[str, PreparedQuestion] = {}
    source_of: dict[str, str] = {}
    contradicting: set[str] = set()
    num_read = 0
    for source, place in sources.items():
        for question in map(read, read_rows(place, "--input")):
            num_read += 1
            known = found.setdefault(question.text, question)
            source_of.setdefault(question.text, source)
            if known.answer != question.answer:
                contradicting.add(question.text)
    kept = [text for text in found if text not in contradicting]
    chosen = _weighted(kept, source_of, list(sources), weights)
    if not 0 <= num_heldout < len(chosen):
        raise UsageError(
            f"--heldout {num_heldout}: {' '.join(sources.values())} gives {len(chosen)} questions "
            f"and at least one must be left to train on; give 0 to {max(0, len(chosen) - 1)}"
        )
    held = set(sorted(chosen, key=_hash)[:num_heldout])
    rows = {text: _row(source_of[text], found[text], system) for text in chosen}
    return Prepared(
        train=[row for text, row in rows.items() if text not in held],
        heldout=[row for text, row in rows.items() if text in held],
        num_read=num_read,
        num_repeated=num_read - len(found),
        num_contradicting=len(contradicting),
        num_unweighted=len(kept) - len(chosen),
    )


def _weighted(
    questions: Sequence[str],
    source_of: Mapping[str, str],
    sources: Sequence[str],
    weights: Sequence[float] | None,
) -> list[str]:
    """Return as many questions of each source as the weights allow, chosen by a hash, in order."""
    if weights is None:
        return list(questions)
    of = {source: [q for q in questions if source_of[q] == source] for source in sources}
    scale = min(len(of[source]) / weight for source, weight in zip(sources, weights, strict=True))
    chosen: set[str] = set()
    for source, weight in zip(sources, weights, strict=True):
        chosen.update(sorted(of[source], key=_hash)[: round(scale * weight)])
    return [q for q in questions if q in chosen]


def _row(source: str, question: PreparedQuestion, system: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "prompt": [*messages, {"role": "user", "content": question.text}],
        "answer": question.answer,
        "source": source,
        **question.kept,
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=sorted(PUBLISHED), help="a published data set")
    parser.add_argument(
        "--input", required=True, nargs="+", metavar="DATA",
        help="data sets, or weights and data sets in turn",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, help="folder to write to")
    parser.add_argument("--heldout", type=int, default=0, help="questions to hold out (default 0)")
    own = parser.add_argument_group("any data set")
    own.add_argument(
        "--question-key", nargs="+", default=["question"], metavar="COLUMN",
        help="columns of the question; the first that a row has is taken (default question)",
    )  # fmt: skip
    own.add_argument(
        "--answer-key", nargs="+", default=["answer"], metavar="COLUMN",
        help="columns of the answer, likewise (default answer)",
    )  # fmt: skip
    own.add_argument(
        "--template", default="{question}", metavar="TEXT",
        help="text of the prompt, with {COLUMN} for values and {question} for the question; @FILE "
        "reads it from a file (default {question})",
    )  # fmt: skip
    own.add_argument("--ask-boxed", action="store_true", help=f"end prompts with: {BOXED}")
    own.add_argument(
        "--answer-regex", default="", metavar="REGEX",
        help="its first group in the answer is the answer, such as '####\\s*(.+)' for gsm8k",
    )  # fmt: skip
    own.add_argument("--system", default="", metavar="TEXT", help="system message; @FILE reads it")
    own.add_argument(
        "--keep", nargs="+", default=[], metavar="COLUMN", help="columns to keep, for rewards"
    )
    own.add_argument(
        "--source", default="", help="name of the data set in the rows (default: its file's)"
    )
    return parser


def _text_or_file(flag: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {value}: {error}; give the text, or @FILE in UTF-8") from error


def _columns(given: argparse.Namespace) -> NamedColumns:
    """Return the reader that the flags describe.

    Raises:
        UsageError: The regular expression is broken or has no group, a column to keep is one that
            every row gets, or a file cannot be read.
    """
    template = _text_or_file("--template", given.template)
    pattern = None
    if given.answer_regex:
        try:
            pattern = re.compile(given.answer_regex)
        except re.error as error:
            raise UsageError(f"--answer-regex {given.answer_regex!r}: {error}") from error
        if not pattern.groups:
            raise UsageError(
                f"--answer-regex {given.answer_regex!r}: put the answer into a group: (...)"
            )
    if taken := {"prompt", "answer", "source"}.intersection(given.keep):
        raise UsageError(f"--keep {' '.join(sorted(taken))}: the output has its own; leave it out")
    if given.ask_boxed:
        template = f"{template}\n{BOXED}"
    questions, answers = tuple(given.question_key), tuple(given.answer_key)
    return NamedColumns(questions, answers, template, pattern, tuple(given.keep))


def _sources(given: argparse.Namespace) -> tuple[dict[str, str], tuple[float, ...] | None]:
    """Return the data sets by the names that their rows get, and their weights.

    Raises:
        UsageError: Weights are malformed, or one data set is given twice.
    """
    blend = parse_blend(tuple(given.input), "--input")
    if given.dataset and len(blend.prefixes) > 1:
        raise UsageError(f"--dataset {given.dataset} is one file; give one --input")
    names = [given.source or given.dataset or Path(place).stem for place in blend.prefixes]
    if len(set(names)) < len(names):
        names = [f"{name}-{i}" for i, name in enumerate(names)]
    if len(set(blend.prefixes)) < len(names):
        raise UsageError(f"--input {' '.join(given.input)}: give each data set once")
    return dict(zip(names, blend.prefixes, strict=True)), blend.weights


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; return 2 for a mistake of the user."""
    given = _parser().parse_args(argv)
    try:
        sources, weights = _sources(given)
        read = PUBLISHED[given.dataset] if given.dataset else _columns(given)
        system = _text_or_file("--system", given.system)
        prepared = prepare_all(sources, read, given.heldout, weights, system)
        write_jsonl(given.output / "train.jsonl", prepared.train)
        if given.heldout:
            write_jsonl(given.output / "heldout.jsonl", prepared.heldout)
    except (UsageError, OSError) as error:  # OSError: --output cannot be written
        print(f"prepare_data: {error}", file=sys.stderr)
        return 2
    unweighted = f"{prepared.num_unweighted} by the weights, " if weights else ""
    print(
        f"{' '.join(given.input)}: {prepared.num_read} rows, {prepared.num_repeated} repeated, "
        f"{prepared.num_contradicting} questions with several answers left out, {unweighted}"
        f"{len(prepared.train)} to train on, {len(prepared.heldout)} held out in {given.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
