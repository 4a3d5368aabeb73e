"""Predicts what moving requests between engines gains, by replaying response lengths.

Lengths are drawn in the shapes that published runs report, or read from the rollouts of a run
(``--rollouts output/rollouts.jsonl``, which has lengths when it was written with
``--log-rollout-tokens``). Time is that of a roofline of decoding, in reads of the weights; the
results are ratios. Nothing is measured here. The last line is ``RESULT {json}``.

    python tools/bench/rebalance.py --replicas 32 --group-size 16
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from mindspeed_rl.rollout.rebalance_plan import StepCost
from mindspeed_rl.rollout.rebalance_sim import Outcome, Policy, Response, simulate
from mindspeed_rl.samples.lengths import LengthHistory, deal_samples

# Published shapes: mean and limit of the responses (research of peers: DeepSeek-R1 on 128 A3 cards,
# Qwen3-235B on 64), and the tokens of context whose keys and values weigh as much as the weights
# that a decode step of one engine reads.
SHAPES = {
    "mean 1.6K, limit 3K": (1576, 3072),
    "mean 7.3K, limit 32K": (7345, 32768),
}
_SPREAD = 0.8  # of the logarithm of a length; half of its variance is the prompt's


def drawn_lengths(
    mean: int, limit: int, prompts: int, size: int, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """[prompts][size] lengths of two epochs: log-normal, cut at the limit, scaled to the mean."""
    draw = random.Random(seed)
    shared = _SPREAD / math.sqrt(2)
    logs = []
    for _ in range(prompts):
        hardness = draw.gauss(0, shared)
        logs.append([hardness + draw.gauss(0, shared) for _ in range(2 * size)])
    low, high = 1.0, 100.0 * mean
    for _ in range(40):
        scale = math.sqrt(low * high)
        rows = [[max(1, min(limit, round(scale * math.exp(x)))) for x in row] for row in logs]
        found = sum(map(sum, rows)) / (2 * prompts * size)
        low, high = (scale, high) if found < mean else (low, scale)
    return [row[:size] for row in rows], [row[size:] for row in rows]


def recorded_lengths(path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Lengths of the rollouts of a run, siblings together; every other one is the earlier epoch.

    Raises:
        ValueError: the file has no lengths.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "response_ids" not in row:
            raise ValueError(f"{path}: no response_ids; write it with --log-rollout-tokens")
        groups.setdefault((row["step"], row["prompt"]), []).append(len(row["response_ids"]))
    several = [row for row in groups.values() if len(row) > 1]
    return [row[::2] for row in several], [row[1::2] for row in several]


def outcomes(
    earlier: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    options: argparse.Namespace,
    limit: int,
) -> dict[str, Outcome]:
    """Every way of dealing and moving, by name."""
    asked = [p for p, row in enumerate(lengths) for _ in row]
    found_lengths = [n for row in lengths for n in row]
    flat = [Response(i, options.prompt_tokens, n) for i, n in enumerate(found_lengths)]
    history = LengthHistory()
    for _ in range(2):  # known prompts have a spread of their own
        history.observe(dict(enumerate(earlier)))
    cost = StepCost(options.ridge_tokens, options.context_tokens)

    def expected(number: int, generated: int) -> int:
        if options.oracle:
            return flat[number].length
        return history.expected(asked[number], generated, limit)

    dealt = {
        "even": deal_samples(asked, options.replicas, None, limit),
        "history": deal_samples(asked, options.replicas, history, limit),
    }
    found = {}
    for name, ids in dealt.items():
        shares = [[flat[i] for i in share] for share in ids]
        for mode in ("off", "waiting", "all"):
            policy = Policy(mode, options.interval, options.gain, options.settle_time)
            found[f"{name}, {mode}"] = simulate(
                shares, options.capacity, options.room, cost, policy, expected
            )
    return found


def main() -> None:
    """Print a table per shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=32, help="engines")
    parser.add_argument("--prompts", type=int, default=512, help="of a step")
    parser.add_argument("--group-size", type=int, default=16, help="samples per prompt")
    parser.add_argument("--capacity", type=int, default=128, help="sequences at once per engine")
    parser.add_argument("--room", type=int, default=10**7, help="cached tokens per engine")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--ridge-tokens", type=float, default=256, help="see StepCost")
    parser.add_argument("--context-tokens", type=float, default=4e5, help="see StepCost")
    parser.add_argument("--interval", type=int, default=128, help="steps between settlements")
    parser.add_argument("--gain", type=float, default=0.05, help="least gain of a change")
    parser.add_argument("--settle-time", type=float, default=0.2, help="in reads of the weights")
    parser.add_argument("--oracle", action="store_true", help="the planner knows all lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=Path, help="rollouts.jsonl of a run")
    parser.add_argument("--response-limit", type=int, default=32768, help="with --rollouts")
    options = parser.parse_args()
    cases = {}
    if options.rollouts:
        cases[str(options.rollouts)] = (
            *recorded_lengths(options.rollouts),
            options.response_limit,
        )
    else:
        for name, (mean, limit) in SHAPES.items():
            drawn = drawn_lengths(mean, limit, options.prompts, options.group_size, options.seed)
            cases[name] = (*drawn, limit)
    results = {}
    for name, (earlier, lengths, limit) in cases.items():
        found = outcomes(earlier, lengths, options, limit)
        base = found["even, off"].time
        print(f"{name}: {sum(map(len, lengths))} responses on {options.replicas} engines")
        for label, o in found.items():
            print(
                f"  {label:18} predicted time {o.time / base:6.3f} of even/off, decode steps "
                f"{o.steps}, idle {o.idle:5.1%}, moved {o.moved} ({o.moved_tokens} tokens)"
            )
        results[name] = {
            label: {"time": o.time / base, "steps": o.steps, "idle": o.idle, "moved": o.moved}
            for label, o in found.items()
        }
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
