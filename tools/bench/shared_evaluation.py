"""Generates an evaluation together with the rollouts of a step, and by itself, on a CPU engine.

    python tools/bench/shared_evaluation.py     # 64 responses, 32 greedy and 32 sampled ones beside

Responses have drawn limits, of which few are long: the model is random and never stops by itself.
``apart`` has three calls of the engine, as a run without --rl-eval-in-rollouts has, ``together``
one; ``floor`` is the step's rollouts alone. Tokens are compared. Ways take turns within a process;
``steps`` are those of the engine, ``ms`` medians of its processor time. The last line is RESULT and
a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401

from bench.engine_alone import PROMPT, add_engine_flags, build, started
from bench.jobs import parser_of, print_result
from mindspeed_rl.core.tables import aligned

WAYS = ("apart", "together", "floor")
TEMPERATURE = 0.7


def passes_of(args: argparse.Namespace) -> list[tuple[float, list[Any]]]:
    """Return temperature and requests of the step, of greedy responses and of sampled ones."""
    from mindspeed_rl.rollout.requests import GenerationRequest, request_seed

    draw, found, number = random.Random(0), [], 0
    wanted = ((args.sequences, 1.0), (args.prompts, 0.0), (args.prompts, TEMPERATURE))
    for attempt, (count, degree) in enumerate(wanted):
        requests = []
        for i in range(count):
            length = min(args.tokens, max(1, round(draw.lognormvariate(0, 0.7) * args.tokens / 6)))
            ids = tuple(range(5 + number % 40, 5 + number % 40 + PROMPT))
            seed = request_seed(0, 1, i, attempt)
            requests.append(GenerationRequest(number, ids, seed, length, temperature=degree))
            number += 1
        found.append((degree, requests))
    return found


def measure(args: argparse.Namespace) -> None:
    """Generate as all ways in turn, and write steps, milliseconds and whether tokens agree."""
    from mindspeed_rl.rollout.requests import SamplingSettings
    from mindspeed_rl.rollout.stats import StepStats

    passes = passes_of(args)
    everything = [r for _, requests in passes for r in requests]
    calls = {"apart": passes, "together": [(1.0, everything)], "floor": passes[:1]}
    engine = build(args, args.capacity)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    steps, tokens = {}, {}
    for _ in range(args.rounds):
        for way in WAYS:
            done: dict[int, Any] = {}
            stats = StepStats()
            engine.stats = stats
            start = time.process_time()
            for degree, requests in calls[way]:
                done |= engine.generate(requests, SamplingSettings(degree, args.tokens, ()), 0)
            took[way].append(1e3 * (time.process_time() - start))
            steps[way] = stats.steps
            tokens[way] = {i: c.token_ids for i, c in done.items()}
    ms = {way: statistics.median(values) for way, values in took.items()}
    record = {"steps": steps, "ms": ms, "equal": tokens["apart"] == tokens["together"]}
    Path(args.result).write_text(json.dumps(record))


def main() -> None:
    """Start the process, or run as it."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, default=64, help="responses of the step (64)")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts (32)")
    parser.add_argument("--capacity", type=int, default=128, help="responses at once (128)")
    parser.add_argument("--rounds", type=int, default=3, help="calls of each way (3)")
    add_engine_flags(parser, tokens=96)
    args = parser.parse_args()
    if args.way:
        measure(args)
        return
    with started(__file__, args.num_layers) as run:
        found = run("all")
    print(f"tokens are {'equal' if found['equal'] else 'DIFFERENT'}")
    table = [["way", "steps", "ms"]]
    table += [[way, str(found["steps"][way]), f"{found['ms'][way]:.0f}"] for way in WAYS]
    print("\n".join(aligned(table)))
    print_result("shared_evaluation", **found)


if __name__ == "__main__":
    main()
