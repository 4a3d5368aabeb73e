"""Compares placements of a step's samples on data-parallel ranks, from lengths alone.

    python tools/bench/balance.py
    python tools/bench/balance.py --lengths lengths.txt --dp 16 --max-tokens 32768

ours         rows packed over all samples, dealt to ranks of equal work (samples/placement.py)
first-fit    samples dealt round-robin, each rank packs its own in order, first row that has room
in order     samples dealt round-robin, each rank packs its own in order, a row is closed when the
             next sample does not fit

Columns: imbalance, how much more the busiest rank has than the mean, in tokens and in FLOPs of
Qwen2.5-7B; efficiency, real tokens among all that travel through the model (all ranks have the
number of rows of the fullest, all rows the length of the longest); rows; milliseconds to plan. The
floor of imbalance is 0, of efficiency 1. The last line is RESULT and a JSON object.

A second table says which share of the samples' bytes leaves the rank that sampled it, where engines
and data-parallel ranks are the same ranks and have sampled equally many: placed without a look at
who has what, with it (samples/locality.py), and with it under context parallelism of 8, where lengths
are placed as multiples of 16. The balance of the first two is the same.

``--lengths`` is a file with one length per line; without it three drawn sets of 8192 samples with
heavy tails are used (log-normal, cut).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    # the folder of the package `bench` instead of that of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from mindspeed_rl.samples.balance import SequenceCost
from mindspeed_rl.samples.locality import bytes_moved, keep_near
from mindspeed_rl.samples.placement import padded, plan_micro_batches

NUM_SAMPLES = 8192
DRAWN = {"mean 1.5K, max 3K": (1500, 3072), "mean 7K, max 32K": (7000, 32768)}
# Qwen2.5-7B: 2 x 7.07e9 weights that tokens are multiplied with; 2 x 28 layers x 28 heads x 256 / 2
COST = SequenceCost(1.414e10, 2 * 28 * 28 * 256 / 2)
Rows = list[list[list[int]]]  # [dp][row] -> samples


def drawn_lengths(mean: float, most: int, seed: int) -> list[int]:
    """Log-normal lengths cut at ``most``, scaled to the mean."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.8, NUM_SAMPLES)
    scale = mean
    for _ in range(50):
        lengths = np.clip(drawn * scale, 32, most)
        scale *= mean / lengths.mean()
    return [int(n) for n in lengths]


def ours(lengths: Sequence[int], dp: int, max_tokens: int) -> Rows:
    """The product."""
    plan = plan_micro_batches(
        lengths, dp=dp, micro_batch_size=1, max_tokens=max_tokens, multiple=1, cost=COST
    )
    return [[list(row) for row in rank] for rank in plan.assignment]


def first_fit(lengths: Sequence[int], dp: int, max_tokens: int) -> Rows:
    """Round-robin, then the first row with room."""
    return _dealt(lengths, dp, max_tokens, look_back=sys.maxsize)


def in_order(lengths: Sequence[int], dp: int, max_tokens: int) -> Rows:
    """Round-robin, then the last row or a new one."""
    return _dealt(lengths, dp, max_tokens, look_back=1)


def _dealt(lengths: Sequence[int], dp: int, max_tokens: int, look_back: int) -> Rows:
    ranks: Rows = []
    for rank in range(dp):
        rows: list[list[int]] = []
        room: list[int] = []
        for i in range(rank, len(lengths), dp):
            first = max(0, len(rows) - look_back)
            place = next((r for r in range(first, len(rows)) if room[r] >= lengths[i]), None)
            if place is None:
                rows.append([])
                room.append(max_tokens)
                place = len(rows) - 1
            rows[place].append(i)
            room[place] -= lengths[i]
        ranks.append(rows)
    return ranks


WAYS: Mapping[str, Callable[[Sequence[int], int, int], Rows]] = {
    "ours": ours,
    "first-fit": first_fit,
    "in order": in_order,
}


def measure(name: str, lengths: Sequence[int], dp: int, max_tokens: int) -> dict[str, float]:
    """One way on one set of lengths."""
    start_s = time.perf_counter()
    ranks = WAYS[name](lengths, dp, max_tokens)
    seconds = time.perf_counter() - start_s
    assert sorted(i for rows in ranks for row in rows for i in row) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for row in rows for i in row) for rows in ranks]
    work = [sum(COST.of(lengths[i]) for row in rows for i in row) for rows in ranks]
    num_rows = max(len(rows) for rows in ranks)
    longest = max(sum(lengths[i] for i in row) for rows in ranks for row in rows)
    return {
        "token_imbalance": max(tokens) * dp / sum(tokens) - 1,
        "flop_imbalance": max(work) * dp / sum(work) - 1,
        "efficiency": sum(tokens) / (num_rows * dp * longest),
        "rows": num_rows * dp,
        "plan_s": seconds,
    }


def movement(
    lengths: Sequence[int], dp: int, max_tokens: int, multiple: int, seed: int
) -> dict[str, float]:
    """Shares of all bytes that leave the rank that sampled them."""
    engine = np.random.default_rng(seed).permutation(np.arange(len(lengths)) % dp)
    moved = np.asarray(lengths, dtype=np.int64)[:, None] * (engine[:, None] != np.arange(dp))
    placed = [padded(n, multiple) for n in lengths]
    plan = plan_micro_batches(
        lengths, dp=dp, micro_batch_size=1, max_tokens=max_tokens, multiple=multiple,
        sequence_multiple=multiple, cost=COST,
    )  # fmt: skip
    start_s = time.perf_counter()
    near = keep_near(plan, placed, moved)
    seconds = time.perf_counter() - start_s
    return {
        "moved": bytes_moved(plan.assignment, moved) / sum(lengths),
        "moved_near": bytes_moved(near.assignment, moved) / sum(lengths),
        "near_s": seconds,
    }


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=Path, help="file with a length per line")
    parser.add_argument("--dp", default="8,32", help="data-parallel sizes (8,32)")
    parser.add_argument("--max-tokens", type=int, default=0, help="of a row (the longest sample)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn lengths (0)")
    args = parser.parse_args()
    if args.lengths:
        sets = {str(args.lengths): [int(line) for line in args.lengths.read_text().split()]}
    else:
        sets = {name: drawn_lengths(*shape, args.seed) for name, shape in DRAWN.items()}
    records = []
    for title, lengths in sets.items():
        for dp in (int(text) for text in args.dp.split(",")):
            limit = args.max_tokens or max(lengths)
            print(f"\n{title}: {len(lengths)} samples on {dp} ranks, rows of {limit} tokens")
            print(
                f"{'way':<10} {'tokens':>8} {'FLOPs':>8} {'efficiency':>10} {'rows':>6} {'ms':>7}"
            )
            for name in WAYS:
                found = measure(name, lengths, dp, limit)
                records.append({"lengths": title, "dp": dp, "way": name, **found})
                print(
                    f"{name:<10} {found['token_imbalance']:+8.2%} {found['flop_imbalance']:+8.2%} "
                    f"{found['efficiency']:10.2%} {found['rows']:6.0f} {found['plan_s'] * 1e3:7.1f}"
                )
        print(f"\n{title}: bytes that leave their rank\n{'ranks':<8} {'multiple':>8} "
              f"{'by length':>10} {'who has it':>10} {'ms':>7}")  # fmt: skip
        for dp, multiple in ((int(text), m) for text in args.dp.split(",") for m in (1, 16)):
            limit = args.max_tokens or padded(max(lengths), multiple)
            move = movement(lengths, dp, limit, multiple, args.seed)
            records.append({"lengths": title, "dp": dp, "multiple": multiple, **move})
            print(
                f"{dp:<8} {multiple:>8} {move['moved']:10.1%} {move['moved_near']:10.1%} "
                f"{move['near_s'] * 1e3:7.1f}"
            )
    print("RESULT " + json.dumps({"bench": "balance", "cases": records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
