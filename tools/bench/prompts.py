"""Times the start of the ranks of a node on their prompts, and the memory that these take.

    python tools/bench/prompts.py                                  # 20,000 rows of 2,000 tokens
    python tools/bench/prompts.py --rows 200000 --plain-rows 20000

first   the first start on new data: one rank tokenises while the others wait
ours    the next starts: all ranks map what the first one wrote
plain   every rank reads and tokenises the data itself, keeps the tokens in an array, and compares
        held-out prompts with a set of all prompts' tokens

Seconds are those of the slowest rank from its first look at the data to the last check of it, with
the tokenizer loaded before. Memory is what the largest rank has more than before: its own and the
pages of files that it looked at, which ranks share; after the start, and after it used the prompts
of a step. All ways find the same fingerprint. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch.distributed as dist
from make_tiny_model import build_tokenizer

from bench.jobs import parser_of, print_result, spawn
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.chat import PromptEncoder
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.rows import in_chunks, read_rows
from mindspeed_rl.parallel.small_collectives import gather_objects

WORDS = ["".join(letters) for letters in itertools.product("bdfgkmnprs", "aeiou", "lmnrstz")]
VOCABULARY = 640
HELD_OUT = 500
STEP_PROMPTS = 512


def write_data(file: Path, rows: int, tokens: int, seed: int) -> None:
    """Write prompts of about ``tokens`` tokens; no two are the same."""
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=50_000 + tokens)
    with file.open("w") as out:
        for number in range(rows):
            begin = rng.randrange(50_000)
            text = f"{seed} {number} {' '.join(words[begin : begin + tokens])}"
            out.write(json.dumps({"prompt": text, "answer": str(number)}) + "\n")


def memory_mb() -> dict[str, float]:
    """Return this process's resident memory: all of it, and its own, without pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(fields[field].split()[0]) / 1024
        for name, field in (("resident", "VmRSS"), ("own", "RssAnon"))
    }


def tokenizer_of_words() -> Any:
    """Return a tokenizer with the words of the data as tokens."""
    return build_tokenizer([" " + word for word in WORDS], VOCABULARY)


def ours(folder: Path, tokenizer: Any, name: str, limit: int) -> tuple[str, Callable[[int], Any]]:
    """Load and check the prompts as a run does."""
    cache = RowCache(str(folder / "cache"))
    train, held_out = (
        load_prompts(
            folder / f"{which}.jsonl", tokenizer, max_prompt_length=limit,
            vocab_size=VOCABULARY, cache=cache,
        )
        for which in (name, "heldout")
    )  # fmt: skip
    if dist.get_rank() == 0:
        assert not set(held_out.digests()) & set(train.digests())
    return train.fingerprint, train.__getitem__


def plain(folder: Path, tokenizer: Any, name: str, limit: int) -> tuple[str, Callable[[int], Any]]:
    """Load and check the prompts on every rank for itself."""
    encoder = PromptEncoder(tokenizer, "prompt", True)
    sets = []
    for which in (name, "heldout"):
        flat, offsets, questions, content = array("i"), array("q", [0]), [], hashlib.sha256()
        for rows in in_chunks(read_rows(folder / f"{which}.jsonl")):
            rendered = [encoder.render(row) for row in rows]
            for row, prompt, ids in zip(rows, rendered, encoder.encode(rendered), strict=True):
                assert len(ids) <= limit
                answer = row.values["answer"]
                content.update(json.dumps([ids, answer, {}], sort_keys=True).encode() + b"\n")
                questions.append((prompt.text, answer))
                flat.extend(ids)
                offsets.append(len(flat))
        sets.append((flat, offsets, questions, content.hexdigest()))
    (flat, offsets, questions, fingerprint), (other, ends, *_) = sets
    known = {tuple(flat[a:b]) for a, b in itertools.pairwise(offsets)}
    assert not any(tuple(other[a:b]) in known for a, b in itertools.pairwise(ends))
    del known
    return fingerprint, lambda i: (tuple(flat[offsets[i] : offsets[i + 1]]), questions[i])


def measure(args: argparse.Namespace) -> None:
    """Time one start on this rank."""
    tokenizer = tokenizer_of_words()
    tokenizer(["one"])
    before = memory_mb()
    dist.barrier()
    begin = time.perf_counter()
    fingerprint, item = args.way(args.folder, tokenizer, args.name, 2 * args.tokens)
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "fingerprint": fingerprint}
    found["start"] = {name: value - before[name] for name, value in memory_mb().items()}
    used = [item(number * 7919 % args.used_rows) for number in range(STEP_PROMPTS)]
    del used
    found["step"] = {name: value - before[name] for name, value in memory_mb().items()}
    ranks = gather_objects(found)
    if dist.get_rank() == 0:
        assert len({rank["fingerprint"] for rank in ranks}) == 1
        largest = {
            when: {name: max(rank[when][name] for rank in ranks) for name in before}
            for when in ("start", "step")
        }
        seconds = max(rank["seconds"] for rank in ranks)
        result = {"seconds": seconds, "fingerprint": fingerprint, **largest}
        (args.folder / "result.json").write_text(json.dumps(result))


def run(args: argparse.Namespace, way: Any, name: str, rows: int) -> dict[str, Any]:
    """Run one way on all ranks; return its result."""
    args.way, args.name, args.used_rows = way, name, rows
    spawn(measure, args, args.ranks)
    found: dict[str, Any] = json.loads((args.folder / "result.json").read_text())
    return found


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=20_000, help="prompts (20000)")
    parser.add_argument("--plain-rows", type=int, help="prompts of the plain way (as --rows)")
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of a prompt (2000)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the node (2)")
    parser.add_argument("--folder", type=Path, help="folder for the data (a temporary one)")
    args = parser.parse_args()
    args.folder = Path(tempfile.mkdtemp(prefix="bench-prompts-", dir=args.folder))
    plain_rows = args.plain_rows or args.rows
    try:
        write_data(args.folder / "heldout.jsonl", HELD_OUT, args.tokens, seed=1)
        write_data(args.folder / "rows.jsonl", args.rows, args.tokens, seed=2)
        write_data(args.folder / "plain.jsonl", plain_rows, args.tokens, seed=2)
        ways = {
            "first": (run(args, ours, "rows", args.rows), args.rows),
            "ours": (run(args, ours, "rows", args.rows), args.rows),
            "plain": (run(args, plain, "plain", plain_rows), plain_rows),
        }
    finally:
        shutil.rmtree(args.folder)
    print(
        f"{args.ranks} ranks, prompts of about {args.tokens} tokens; MB (2^20) of the largest rank"
    )
    print(
        f"{'':8}{'rows':>9}{'seconds':>9}{'at start':>10}{'its own':>9}"
        f"{'in a step':>11}{'its own':>9}"
    )
    for name, (found, rows) in ways.items():
        start, step = found["start"], found["step"]
        print(
            f"{name:8}{rows:9}{found['seconds']:9.1f}{start['resident']:10.0f}{start['own']:9.0f}"
            f"{step['resident']:11.0f}{step['own']:9.0f}"
        )
    same = {found["fingerprint"] for found, rows in ways.values() if rows == args.rows}
    assert len(same) == 1, same
    print_result("prompts", ways={n: found | {"rows": rows} for n, (found, rows) in ways.items()})


if __name__ == "__main__":
    main()
