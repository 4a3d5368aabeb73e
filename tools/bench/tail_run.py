"""Counts the idle decode slots of whole runs, beside those that tail.py simulates for them.

    python tools/bench/tail_run.py --slots 16 4

Runs train_rl with two engines on word problems of one to three steps, whose responses are the
longer the more steps there are, after a short supervised warm start. The learning rate is 1e-6, so
that lengths stay as they are. The ways are those of tail.py:

as drawn               --rollout-balance even
dealt, longest first   the default
dealt and moved        --rollout-rebalance all
ordered                --prompt-order by-length
ordered and moved      both
ordered, moved, drafts ... and --rollout-drafts history, after every step

The first epoch makes the history, the second is counted. Responses are other draws where a prompt
comes in another step, so each run is compared with simulations of its own lengths, by epoch and
prompt: of its way, with as many steps per token where it has drafts, and of ``as drawn``.

steps    decode steps of the slowest engine in a rollout, mean over the epoch; in brackets over that
         as drawn with the same lengths
idle     share of the slots of all engines and of these steps in which no response was computed

The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model

from bench import tail
from bench.drafts import always_drafting
from bench.jobs import parser_of, print_result, torchrun
from mindspeed_rl.core.tables import aligned

ENGINES = 2
INTERVAL = 8
_MOVED = ("--rollout-rebalance", "all", "--rollout-rebalance-interval", str(INTERVAL))
_ORDERED = ("--prompt-order", "by-length")
WAYS: Mapping[str, tuple[tail.Way, tuple[str, ...]]] = {
    way.name: (way, flags)
    for way, flags in (
        (tail.Way("as drawn", dealt=False, sorted=False), ("--rollout-balance", "even")),
        (tail.Way("dealt, longest first"), ()),
        (tail.Way("dealt and moved", moved=True), _MOVED),
        (tail.Way("ordered", ordered=True), _ORDERED),
        (tail.Way("ordered and moved", ordered=True, moved=True), (*_ORDERED, *_MOVED)),
        (
            tail.Way("ordered, moved, drafts", ordered=True, moved=True),
            (*_ORDERED, *_MOVED, "--rollout-drafts", "history"),
        ),
    )
}
LIMIT = 96
DRAWN = "as drawn"


@dataclass(frozen=True, slots=True)
class CountedRun:
    """What a run counted.

    Attributes:
        lengths: Lengths of the responses by epoch and place of the prompt in the data.
        steps: Steps of the slowest engine, of each step of the second epoch.
        steps_per_token: Steps of all responses over their tokens, in the second epoch.
    """

    lengths: Mapping[tuple[int, int], tuple[int, ...]]
    steps: tuple[float, ...]
    steps_per_token: float

    def figures(self, slots: int) -> dict[str, float]:
        """Return the figures of a row; ``slots`` are those of all engines."""
        tokens = sum(sum(found) for (epoch, _), found in self.lengths.items() if epoch)
        computed = tokens * self.steps_per_token
        return {
            "steps": statistics.mean(self.steps),
            "idle": 1 - computed / (slots * sum(self.steps)),
        }


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Write the model, the prompts and a reward."""
    write_tiny_model(
        folder / "random", hidden_size=128, num_layers=2, ffn=256, max_position_embeddings=320
    )
    write_jsonl(folder / "rl.jsonl", generate_task("word_problem", args.dataset, 1))
    write_jsonl(folder / "sft.jsonl", generate_task("word_problem", 4000, 2))
    torchrun(
        ENGINES, "-m", "mindspeed_rl.pretrain", "--platform", "cpu",
        "--hf-checkpoint", str(folder / "random"), "--sft-data", f"{folder}/sft.jsonl",
        "--train-iters", str(args.warm_steps), "--global-batch-size", "32",
        "--micro-batch-size", "16", "--lr", "2e-3", "--output-dir", f"{folder}/warm",
        "--export-hf", f"{folder}/model", quiet=True,
    )  # fmt: skip
    (folder / "reward.py").write_text(
        "def right(request):\n    return float(request.answer in request.response)\n"
    )


@contextmanager
def drafting(flags: tuple[str, ...], folder: Path) -> Iterator[None]:
    """Let the processes of a run with drafts seek them after every step."""
    with mock.patch.dict(os.environ):
        if "--rollout-drafts" in flags:
            os.environ["PYTHONPATH"] = always_drafting(folder)
        yield


def run(folder: Path, name: str, slots: int, args: argparse.Namespace) -> CountedRun:
    """Run two epochs in a way and count them."""
    output, flags = folder / f"{name} {slots}", WAYS[name][1]
    with drafting(flags, folder / f"drafts {slots}"):
        torchrun(
            ENGINES, "-m", "mindspeed_rl.train_rl", "--platform", "cpu",
            "--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "rl.jsonl"),
            "--train-iters", str(2 * args.dataset // args.prompts),
            "--grpo-prompts-per-step", str(args.prompts), "--grpo-group-size", str(args.group),
            "--micro-batch-size", str(args.prompts * args.group // ENGINES),
            "--max-prompt-length", "192", "--rollout-max-response-length", str(LIMIT),
            "--rollout-kv-cache-gb", "0.25", "--vllm-max-num-seqs", str(slots), "--lr", "1e-6",
            "--seed", str(args.seed), "--reward-function", f"{folder / 'reward.py'}:right",
            "--log-rollouts", str(args.prompts * args.group),
            "--output-dir", str(output), *flags, quiet=True,
        )  # fmt: skip
    per_epoch = args.dataset // args.prompts
    rows = [json.loads(line) for line in (folder / "rl.jsonl").read_text().splitlines()]
    places = {row["prompt"][-1]["content"]: i for i, row in enumerate(rows)}
    lengths = defaultdict(list)
    for line in (output / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        lengths[(row["step"] - 1) // per_epoch, places[row["prompt"]]].append(row["length"])
    assert len(lengths) == 2 * args.dataset
    assert all(len(found) == args.group for found in lengths.values())
    lines = (output / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "rollout/steps_max" in row][per_epoch:]
    return CountedRun(
        {key: tuple(found) for key, found in lengths.items()},
        tuple(row["rollout/steps_max"] for row in steps),
        statistics.mean(row.get("rollout/steps_per_token", 1.0) for row in steps),
    )


def simulated(
    counted: CountedRun, way: tail.Way, slots: int, args: argparse.Namespace
) -> dict[str, float]:
    """Return the figures of a simulation with the lengths of a run."""
    case = tail.DrawnRollouts(
        dataset=args.dataset, prompts=args.prompts, group=args.group, engines=ENGINES, slots=slots,
        limit=LIMIT, interval=INTERVAL, seed=args.seed,
    )  # fmt: skip

    def lengths_of(_: object, epoch: int, prompt: int) -> tuple[int, ...]:
        return counted.lengths[epoch, prompt]

    with mock.patch.object(tail, "lengths_of", lengths_of):
        found = tail.measure(case, way)
    computed = found.tokens * way.steps_per_token
    return {
        "steps": found.time / found.num_steps,
        "idle": 1 - computed / (ENGINES * slots * found.time),
    }


def table(folder: Path, slots: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Run and simulate every way with so many slots of an engine."""
    rows: dict[str, dict[str, Any]] = {}
    for name in args.ways:
        found = run(folder, name, slots, args)
        way = replace(WAYS[name][0], steps_per_token=found.steps_per_token)
        rows[name] = {
            DRAWN: simulated(found, WAYS[DRAWN][0], slots, args),
            "simulated": simulated(found, way, slots, args),
            "run": found.figures(ENGINES * slots),
            "steps_per_token": found.steps_per_token,
        }
    return rows


def show(slots: int, rows: dict[str, dict[str, Any]]) -> None:
    """Print the table of a number of slots."""
    kinds = (DRAWN, "simulated", "run")
    lines = [[f"{slots} slots", *(cell for kind in kinds for cell in (f"{kind}, steps", "idle"))]]
    for name, row in rows.items():
        cells = [name]
        for kind in kinds:
            steps, idle = row[kind]["steps"], row[kind]["idle"]
            cells += [f"{steps:.1f} ({steps / row[DRAWN]['steps']:.2f})", f"{idle:.1%}"]
        lines.append(cells)
    print("\n".join(aligned(lines)), flush=True)


def command_line() -> argparse.Namespace:
    """Read the flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--dataset", type=int, default=128, help="prompts of an epoch (128)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step (8)")
    parser.add_argument("--group", type=int, default=4, help="samples of a prompt (4)")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 4], help="of an engine (16 4)")
    parser.add_argument("--warm-steps", type=int, default=200, help="supervised steps (200)")
    parser.add_argument("--seed", type=int, default=0, help="of order and samples (0)")
    names = parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    names.help = "rows (all)"
    args = parser.parse_args()
    if args.dataset % args.prompts or args.dataset == args.prompts:
        parser.error(f"--dataset {args.dataset}: must be several times --prompts {args.prompts}")
    return args


def main() -> None:
    """Print a table for each number of slots."""
    args = command_line()
    tables = {}
    with tempfile.TemporaryDirectory(prefix="tail-") as name:
        prepare(Path(name), args)
        for slots in args.slots:
            tables[str(slots)] = table(Path(name), slots, args)
            show(slots, tables[str(slots)])
    print_result("tail_run", **{k: v for k, v in vars(args).items() if k != "slots"}, slots=tables)


if __name__ == "__main__":
    main()
