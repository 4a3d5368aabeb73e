"""Writes a jsonl file of verifiable tasks, generated from a seed.

Two tasks need no download, so every recipe, test and demo can run offline:

* ``digit_sort``: sort the digits of a string, ``529146`` -> ``124569``. One step of thought, a
  very small model learns it in minutes.
* ``word_problem``: arithmetic word problems of one to three steps with worked solutions that end
  in ``#### 42``, the form of the public grade-school data sets.

Whether a prompt is held out is decided by a hash of its text alone. The two splits are therefore
disjoint for every seed, number of rows and option.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs_environment  # noqa: F401

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.data.rows import read_rows

# One in this many prompts is held out.
_HELDOUT_MODULUS = 10
_NUM_DIGITS = 6
# After this many draws in a row without a new prompt the task has (nearly) no more of them.
_MAX_FRUITLESS_DRAWS = 100_000


@dataclass(frozen=True, slots=True)
class Problem:
    """One generated question.

    Attributes:
        question: Text of the user message.
        answer: Final answer, as the rewards compare it.
        solution: Response to imitate; has the answer at its end.
        difficulty: Number of digits (``digit_sort``) or of steps (``word_problem``).
    """

    question: str
    answer: str
    solution: str
    difficulty: int


def is_heldout(question: str) -> bool:
    """Whether ``question`` belongs to the held-out split: crc32 of its UTF-8 bytes, one in ten."""
    return zlib.crc32(question.encode()) % _HELDOUT_MODULUS == 0


def generate_task(
    name: str, num_rows: int, seed: int, split: str = "train"
) -> Iterator[dict[str, Any]]:
    """Yield ``num_rows`` rows of task ``name`` with different prompts.

    The rows depend on the arguments only; a longer run starts with the rows of a shorter one.

    Args:
        name: ``"digit_sort"`` or ``"word_problem"``.
        num_rows: Number of rows.
        seed: Seed of the rows; does not move a prompt from one split to the other.
        split: ``"train"`` or ``"heldout"``.

    Yields:
        ``{"prompt": [{"role": "user", "content": ...}], "answer": str, "solution": str, "metadata":
        {"task": name, "difficulty": int}}``.

    Raises:
        UsageError: The task has fewer different prompts.
    """
    rng = random.Random(f"{name}/{split}/{seed}")
    seen: set[str] = set()
    fruitless = 0
    while len(seen) < num_rows:
        problem = _TASKS[name](rng)
        if problem.question in seen or is_heldout(problem.question) != (split == "heldout"):
            fruitless += 1
            if fruitless >= _MAX_FRUITLESS_DRAWS:
                raise UsageError(
                    f"--num-rows {num_rows}: only {len(seen)} different prompts of --task {name} "
                    f"--split {split} were found; ask for fewer rows"
                )
            continue
        fruitless = 0
        seen.add(problem.question)
        yield {
            "prompt": [{"role": "user", "content": problem.question}],
            "answer": problem.answer,
            "solution": problem.solution,
            "metadata": {"task": name, "difficulty": problem.difficulty},
        }


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write ``rows`` as one JSON object per line; the file appears complete or not at all.

    Args:
        path: File to write; its folder is made, an older file is replaced.
        rows: Rows to write, consumed once.

    Returns:
        The number of rows written.
    """
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_text_atomic(path, "".join(lines))
    return len(lines)


def _draw_digit_sort(rng: random.Random) -> Problem:
    question = "".join(rng.choice("0123456789") for _ in range(_NUM_DIGITS))
    rng.random()  # unused draw: without it a seed would give other rows
    answer = "".join(sorted(question))
    return Problem(question, answer, answer, _NUM_DIGITS)


# ---- word_problem ----------------------------------------------------------------------------

_NAMES = ("Ada", "Ben", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kofi")
_ITEMS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
_OPENINGS = (
    "{name} has {amount} {items}.",
    "{name} starts the day with {amount} {items}.",
    "There are {amount} {items} in the bag of {name}.",
)
_EVENTS = {
    "+": (
        "Then {name} buys {amount} more.",
        "A friend gives {name} {amount} more.",
        "Later {name} finds {amount} more.",
    ),
    "-": (
        "Then {name} gives away {amount} of them.",
        "Later {name} loses {amount} of them.",
        "{name} sells {amount} of them.",
    ),
    "*": (
        "A week later {name} has {amount} times as many.",
        "After some trading {name} has {amount} times as many.",
    ),
    "/": (
        "{name} packs them into {amount} equal boxes and keeps one box.",
        "{name} shares them equally among {amount} people and keeps one share.",
    ),
}
_QUESTIONS = (
    "How many {items} does {name} have now?",
    "How many {items} are left with {name} in the end?",
)
_MAX_WORD_STEPS = 3
_MAX_START = 20  # the largest quantity that opens a story
# Products stay below this, so that the mental arithmetic and the token count stay small.
_MAX_PRODUCT = 200


def _draw_word_problem(rng: random.Random) -> Problem:
    num_steps = rng.randint(1, _MAX_WORD_STEPS)
    words = {"name": rng.choice(_NAMES), "items": rng.choice(_ITEMS)}
    value = rng.randint(2, _MAX_START)
    story = [rng.choice(_OPENINGS).format(amount=value, **words)]
    working = []
    for _ in range(num_steps):
        symbol, amount = _draw_operation(rng, value)
        result = _OPERATIONS[symbol](value, amount)
        story.append(rng.choice(_EVENTS[symbol]).format(amount=amount, **words))
        working.append(f"{value} {symbol} {amount} = {result}")
        value = result
    story.append(rng.choice(_QUESTIONS).format(**words))
    solution = "\n".join([*working, f"#### {value}"])
    return Problem(" ".join(story), str(value), solution, num_steps)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


def _draw_operation(rng: random.Random, value: int) -> tuple[str, int]:
    """Draw an operator and an operand that keep the running ``value`` a positive integer."""
    operands: dict[str, list[int]] = {
        "+": list(range(2, 21)),
        "-": list(range(1, min(value, 21))),
        "*": [factor for factor in range(2, 6) if value * factor <= _MAX_PRODUCT],
        "/": [divisor for divisor in range(2, 6) if value % divisor == 0],
    }
    symbol = rng.choice([symbol for symbol, choices in operands.items() if choices])
    return symbol, rng.choice(operands[symbol])


_TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "digit_sort": _draw_digit_sort,
    "word_problem": _draw_word_problem,
}
TASK_NAMES = tuple(sorted(_TASKS))


def prompts_of(path: str) -> set[str]:
    """Return the user messages of a file.

    Raises:
        UsageError: There is no such file, or a row of it is broken or has no prompt.
    """
    found = set()
    for row in read_rows(path):
        if "prompt" not in row.values:
            raise UsageError(f"{row.where}: no column 'prompt', only {sorted(row.values)}")
        found.add(json.dumps(row.values["prompt"]))
    return found


def main() -> None:
    """Generate the rows, check that they share no prompt with other files, write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASK_NAMES, default="digit_sort")
    parser.add_argument("--num-rows", type=int, required=True, help="Rows to write.")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--seed", type=int, default=0, help="Other seeds give other rows.")
    parser.add_argument("--output", required=True, help="File to write.")
    parser.add_argument(
        "--disjoint-from", nargs="*", default=[], help="Files that may share no prompt with it."
    )
    args = parser.parse_args()
    try:
        if args.num_rows < 1:
            raise UsageError(f"--num-rows {args.num_rows}: must be at least 1")
        rows = list(generate_task(args.task, args.num_rows, args.seed, args.split))
        mine = {json.dumps(row["prompt"]) for row in rows}
        for other in args.disjoint_from:
            if common := mine & prompts_of(other):
                raise UsageError(
                    f"--disjoint-from {other}: it has {len(common)} of the prompts; give "
                    "another --seed or fewer rows"
                )
        count = write_jsonl(args.output, rows)
    except (UsageError, OSError) as error:  # OSError: --output cannot be written
        parser.exit(2, f"make_task_data: {error}\n")
    print(f"{args.output}: {count} rows of {args.task} ({args.split})")


if __name__ == "__main__":
    main()
