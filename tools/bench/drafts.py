"""Measures drafts from earlier responses on the CPU engine: steps, seconds, and a whole run.

    python tools/bench/drafts.py                   # steps of 16 prompts x 8 samples of 160 tokens
    python tools/bench/drafts.py --calls 40 --tokens 7      # seconds, with the quickstart's sizes
    python tools/bench/drafts.py --quickstart 200 --plans always   # the quickstart, twice

By default it counts steps per token, with drafts after every step, as long as pays at a cost of
1/20 of a step per drafted token:

epoch 1..3  samples of new seeds in each, with the responses of the epochs before
again       the seeds of the last epoch once more: the true continuation is among the drafts, which
            is the limit

The model is random, with 2 layers; the sharper its head is, the more siblings agree. ``agree`` is
the share of tokens that the response before it of the same prompt has at the same place.

With --calls it times so many calls of an engine, each with new seeds, with a head of --sharpness:

none        an engine without drafts
never       one that could draft, and whose plans seek none
measured    the product: drafts are sought as far as measured seconds allow
always      drafts are sought after every step

Seconds are processor time of the engine's process, as a median over calls without the first
quarter; ``search`` is the part of them in which drafts were sought. With --quickstart it runs
quickstart.sh on --rows prompts without and with drafts, compares to the bit all that does not
measure the machine (the metrics of the engine's log-probs are told apart), and prints seconds of
generating, and steps and accepted tokens by epoch beside the least steps of drafts that are always
right. The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch
from make_task_data import generate_task, write_jsonl

from bench.engine_alone import PROMPT, add_engine_flags, build, started
from bench.jobs import ROOT, parser_of, print_result
from mindspeed_rl.core.tables import aligned

SHARPNESS = (0.2, 0.6, 2.0)
TEMPERATURE = 0.7
WAYS = ("none", "never", "measured", "always")
STEPS = "steps"
PROMPTS_PER_STEP = 64  # of quickstart.sh
ALWAYS = """from mindspeed_rl.rollout import draft_costs
draft_costs.plan_drafts = lambda *_: draft_costs.DraftPlan(1, 0.05, 0.0)
draft_costs.DraftController.seeks = lambda _: True
"""
# Metrics of the engine's steps, of which there are fewer with drafts.
OF_STEPS = (" rollout/steps:", " rollout/steps_max:", " rollout/kv_cache_use_max:")
# Log-probs of the engine, which a step of more rows may round differently.
OF_LOGPROBS = " mismatch/"


def give_weights(engine: Any, sharpness: float, version: int) -> None:
    """Give the engine random weights whose head has this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    engine.begin_update()
    for name, view in engine.weight_views().items():
        view.normal_(0, sharpness if "head" in name else 0.3, generator=generator)
    engine.finish_update(version)


@contextmanager
def plans(way: str) -> Iterator[None]:
    """Replace the measured plans of this process by those of a way."""
    from mindspeed_rl.rollout import draft_costs

    with ExitStack() as stack:
        if way not in ("none", "measured"):
            seeks = mock.patch.object(
                draft_costs.DraftController, "seeks", lambda _: way != "never"
            )
            stack.enter_context(seeks)
        if way == STEPS:  # at assumed costs, so that figures do not depend on seconds
            assumed = draft_costs.DraftPlan(1, draft_costs.DraftRule().token_cost, 0.0)
            stack.enter_context(mock.patch.object(draft_costs, "plan_drafts", lambda *_: assumed))
        yield


def requests_of(args: argparse.Namespace, version: int, step: int) -> list[Any]:
    """Return the requests of a step: the same prompts in all, with other seeds."""
    from mindspeed_rl.rollout.requests import GenerationRequest, request_seed

    return [
        GenerationRequest(
            i,
            (version, *range(5 + i // args.group, 4 + PROMPT + i // args.group)),
            request_seed(0, step, i),
        )
        for i in range(args.prompts * args.group)
    ]


def generate(engine: Any, history: Any, args: argparse.Namespace, version: int, step: int) -> Any:
    """Sample a step, remember its responses and return completions and counters."""
    from mindspeed_rl.rollout.draft_history import prompt_key
    from mindspeed_rl.rollout.requests import SamplingSettings
    from mindspeed_rl.rollout.stats import StepStats

    stats = engine.stats = StepStats()
    requests = requests_of(args, version, step)
    done = engine.generate(requests, SamplingSettings(TEMPERATURE, args.tokens, ()), version)
    for request in requests:
        history.add(prompt_key(request.token_ids), done[request.sample_id].token_ids)
    return [done[request.sample_id].token_ids for request in requests], stats


def run_epochs(engine: Any, history: Any, args: argparse.Namespace, version: int) -> list[Any]:
    """Sample three epochs and the last one again; return a row of figures for each."""
    rows = []
    for name, step in (("epoch 1", 1), ("epoch 2", 2), ("epoch 3", 3), ("again", 3)):
        done, stats = generate(engine, history, args, version, step)
        same = [
            x == y
            for i, (one, other) in enumerate(pairwise(done))
            if (i + 1) % args.group
            for x, y in zip(one, other, strict=True)
        ]
        rows.append(
            {
                "way": name,
                "agree": sum(same) / len(same),
                "steps_per_token": stats.response_steps / stats.sampled_tokens,
                "engine_steps_per_token": stats.steps / args.tokens,
                "draft": stats.drafted_tokens / max(1, stats.drafts),
                "kept": stats.kept_tokens / max(1, stats.drafts),
            }
        )
    return rows


def time_calls(engine: Any, history: Any, args: argparse.Namespace) -> dict[str, float]:
    """Return the processor seconds of a call, and what was drafted in all of them."""
    seconds, searches, tokens, steps = [], [], 0, 0
    for step in range(args.calls):
        start = time.process_time()
        _, stats = generate(engine, history, args, 1, step)
        seconds.append(time.process_time() - start)
        searches.append(stats.draft_seconds)
        tokens += stats.sampled_tokens
        steps += stats.response_steps or stats.sampled_tokens
    late = args.calls // 4
    return {
        "ms_per_call": 1e3 * statistics.median(seconds[late:]),
        "search_ms": 1e3 * statistics.mean(searches[late:]),
        "steps_per_token": steps / tokens,
    }


def measure(args: argparse.Namespace) -> None:
    """Run an engine as one of the ways and write its figures."""
    from mindspeed_rl.rollout.draft_costs import DraftRule
    from mindspeed_rl.rollout.draft_history import DraftHistory

    history = DraftHistory(2**28)
    drafts = {"draft_rule": DraftRule(most=args.most), "draft_history": history}
    engine = build(args, args.prompts * args.group, **({} if args.way == "none" else drafts))
    found: Any
    with plans(args.way):
        if args.way == STEPS:
            found = {}
            for version, sharpness in enumerate(SHARPNESS, 1):
                give_weights(engine, sharpness, version)
                found[str(sharpness)] = run_epochs(engine, history, args, version)
        else:
            give_weights(engine, args.sharpness, 1)
            found = time_calls(engine, history, args)
    Path(args.result).write_text(json.dumps(found))


def quickstart(args: argparse.Namespace) -> None:
    """Run the quickstart without and with drafts, compare both, and print steps and seconds."""
    from compare_runs import differences

    with tempfile.TemporaryDirectory(prefix="drafts-") as folder:
        data = Path(folder) / "rl.jsonl"
        write_jsonl(data, generate_task("digit_sort", args.rows, 2000))
        runs = {name: Path(folder) / name for name in ("none", "history")}
        for name, output in runs.items():
            script = str(ROOT / "pretrain_scripts" / "quickstart.sh")
            command = [script, "--output", str(output), "--train-iters", str(args.quickstart)]
            command += ["--log-rollouts", "512", "--log-rollout-tokens", "--rollout-drafts", name]
            command += ["--rollout-draft-tokens", str(args.most), "--prompt-data", str(data)]
            environment = dict(os.environ)
            if name == "history" and args.plans == "always":
                environment["PYTHONPATH"] = always_drafting(Path(folder) / "always")
            subprocess.run(["bash", *command], check=True, stdout=subprocess.DEVNULL,
                           env=environment)  # fmt: skip
        first, second = (output / "rl" for output in runs.values())
        found = [
            line for line in differences(first, second) if not any(n in line for n in OF_STEPS)
        ]
        responses = [logged(run) for run in (first, second)]
        seconds = {name: generating(output / "rl") for name, output in runs.items()}
        epochs = by_epoch(second, responses[1], args.rows // PROMPTS_PER_STEP, args.most)
    rounded = [line for line in found if OF_LOGPROBS in line]
    others = [line for line in found if OF_LOGPROBS not in line]
    print("\n".join([*others[:20], *rounded[:3]]))
    samples, same = len(responses[0]), responses[0] == responses[1]
    equal = not others and same
    print(
        f"{args.quickstart} steps, {samples} responses: tokens {_verdict(same)}, weights and "
        f"metrics {_verdict(not others)}, but for {len(rounded)} metrics of log-probs"
    )
    table = [["epoch", *next(iter(epochs.values()))]]
    table += [[str(n), *(f"{v:.2f}" for v in row.values())] for n, row in epochs.items()]
    print("\n".join(aligned(table)))
    for name, values in seconds.items():
        print(f"{name}: {sum(values):.2f} s of generating, {statistics.median(values):.4f} a step")
    print_result(
        "drafts",
        equal=equal,
        samples=samples,
        rounded=len(rounded),
        epochs=epochs,
        generating={n: sum(v) for n, v in seconds.items()},
    )


def _verdict(equal: bool) -> str:
    return "equal to the bit" if equal else "DIFFERENT"


def always_drafting(folder: Path) -> str:
    """Return the ``PYTHONPATH`` of processes that draft after every step, at assumed costs.

    Python runs a module of this name when it starts.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ALWAYS)
    return os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])


def logged(run: Path) -> list[tuple[int, int, list[int]]]:
    """Return step, number and tokens of all samples that a run has logged."""
    with (run / "rollouts.jsonl").open() as lines:
        rows = map(json.loads, lines)
        return [(row["step"], row["sample_id"], row["response_ids"]) for row in rows]


def by_epoch(
    run: Path, responses: Sequence[tuple[int, int, list[int]]], steps: int, most: int
) -> dict[int, dict[str, float]]:
    """Return the drafts of a run by epoch, each with so many steps.

    ``steps_per_token`` counts the steps of all responses, ``engine_steps`` those of an engine in a
    step of the run. ``least`` of both has drafts of ``most`` tokens that are right: after the first
    token, each step gives one more than these.
    """
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = defaultdict(list)
    for step, _, tokens in responses:
        lengths[(step - 1) // steps + 1].append(len(tokens))
    drafted = defaultdict(list)
    for row in rows:
        if "rollout/steps_per_token" in row:
            drafted[(row["step"] - 1) // steps + 1].append(row)

    def mean(epoch: int, name: str) -> float:
        values = [row[name] for row in drafted[epoch] if not math.isnan(row[name] or math.nan)]
        return statistics.mean(values) if values else math.nan

    found = {}
    for epoch in drafted:
        counts = lengths[epoch]
        least = [1 + math.ceil((count - 1) / (1 + most)) for count in counts]
        found[epoch] = {
            "steps_per_token": mean(epoch, "rollout/steps_per_token"),
            "least": sum(least) / sum(counts),
            "engine_steps": mean(epoch, "rollout/steps"),
            "least_engine": float(max(least)),
            "draft": mean(epoch, "rollout/draft_tokens"),
            "accepted": mean(epoch, "rollout/draft_kept_tokens"),
        }
    return found


def generating(output: Path) -> list[float]:
    """Return the seconds of generating of each step of a run."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["time/generate_s"] for row in rows if "optimizer/skipped" in row]


def command_line() -> argparse.Namespace:
    """Read the flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="prompts (16)")
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt, at least 2 (8)")
    parser.add_argument("--most", type=int, default=8, help="longest draft (8)")
    parser.add_argument("--calls", type=int, default=0, help="calls to time (0: count steps)")
    parser.add_argument("--sharpness", type=float, default=0.6, help="of timed calls (0.6)")
    parser.add_argument("--quickstart", type=int, default=0, help="steps of the quickstart (0)")
    parser.add_argument("--rows", type=int, default=4096, help="prompts of its data (4096)")
    plans = parser.add_argument("--plans", choices=("measured", "always"), default="measured")
    plans.help = "with --quickstart: drafts by measured seconds, or after every step (measured)"
    add_engine_flags(parser, tokens=160)
    return parser.parse_args()


def launch(args: argparse.Namespace) -> None:
    """Run engines in processes of their own, and print their figures."""
    with started(__file__, args.num_layers) as run:
        if args.calls:
            timed = {way: run(way) for way in WAYS}
            table = [["way", *timed["none"]]]
            table += [[way, *(f"{v:.2f}" for v in row.values())] for way, row in timed.items()]
            print("\n".join(aligned(table)))
            print_result("drafts", tokens=args.tokens, calls=timed)
            return
        found = run(STEPS)
    table = [["head", *next(iter(found.values()))[0]]]
    for sharpness, rows in found.items():
        for row in rows:
            table.append([sharpness, row.pop("way"), *(f"{value:.2f}" for value in row.values())])
    print("\n".join(aligned(table)))
    print_result("drafts", tokens=args.tokens, steps={
        sharpness: [round(row["steps_per_token"], 4) for row in rows]
        for sharpness, rows in found.items()
    })  # fmt: skip


def main() -> None:
    """Start the processes, or run as one of them."""
    args = command_line()
    if args.way:
        measure(args)
    elif args.quickstart:
        quickstart(args)
    else:
        launch(args)


if __name__ == "__main__":
    main()
