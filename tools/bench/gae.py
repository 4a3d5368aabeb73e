"""Times generalized advantage estimation (GAE) on one core, beside a loop over tokens.

    python tools/bench/gae.py --tokens 32768 --rows 16

loop    one step of R_t = d_t + gamma lambda R_{t+1} after the other, for all rows together
blocks  the product's scan: triangular products of blocks, whose first values are scanned again

Both get the same rewards and values; differences are from fp64. Seconds are medians. The last line
is RESULT and a JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.jobs import parser_of, print_result
from mindspeed_rl.algorithms.token_advantages import generalized_advantages

DISCOUNT, TRACE_DECAY = 0.999, 0.95
REPEATS = 5


def loop(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the advantages of rows of equal length, [rows, tokens]."""
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    errors = rewards + DISCOUNT * following - values
    found, total = torch.empty_like(errors), torch.zeros_like(errors[:, 0])
    for t in range(errors.size(1) - 1, -1, -1):
        total = errors[:, t] + DISCOUNT * TRACE_DECAY * total
        found[:, t] = total
    return found


def blocks(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the same by the product."""
    found = generalized_advantages(
        rewards.flatten(),
        values.flatten(),
        [rewards.size(1)] * rewards.size(0),
        discount=DISCOUNT,
        trace_decay=TRACE_DECAY,
    )
    return found.advantages.view_as(rewards)


def seconds(compute: Callable[[], object]) -> float:
    """Return the median of some runs after one that is not counted."""
    compute()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        compute()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Print the times of both ways and their differences from fp64."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn((2, args.rows, args.tokens), generator=generator)
    exact = loop(rewards.double(), values.double())
    results = {}
    for name, way in (("loop", loop), ("blocks", blocks)):
        taken = seconds(lambda way=way: way(rewards, values))  # type: ignore[misc]
        error = float((way(rewards, values) - exact).abs().max() / exact.abs().max())
        results[name] = {"seconds": taken, "relative_error": error}
        print(f"{name:8s}{taken:10.4f} s   largest error {error:.1e} of the largest advantage")
    print_result("gae", tokens=args.tokens, rows=args.rows, **results)


if __name__ == "__main__":
    main()
