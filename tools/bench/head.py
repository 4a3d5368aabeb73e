"""Times the log-prob head on one core, beside the matrix products that it cannot do without.

    python tools/bench/head.py --tokens 1024 --vocabulary 151936 --hidden 896

head      forward and backward pass, with the weight gradient added to a buffer of gradients
products  logits, logits once more (recomputed), gradient of the hidden states, of the weight: each
          one matrix product over all tokens and the whole vocabulary, in the same precision

Seconds are of CPU time, the shortest of some runs taken in turn. The peak is that of the head's
pass, beside what it is given, as the system reports it. bfloat16 takes minutes where torch has no
fast product of it for the CPU; --precisions float32 leaves it out. The last line is RESULT and a
JSON object.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.jobs import parser_of, print_result
from mindspeed_rl.core.logit_tiles import logit_tile
from mindspeed_rl.platforms.registry import select_platform
from mindspeed_rl.trainer.logprobs import selected_logprobs

TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Work:
    """Hidden states [N, h], a weight [V, h] with its buffer of gradients, and targets [N]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def random(cls, tokens: int, vocabulary: int, hidden: int, dtype: torch.dtype) -> Work:
        """Draw the work of a micro-batch, with logits of a spread of about 2."""
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(tokens, hidden, generator=generator).to(dtype)
        weight = torch.randn(vocabulary, hidden, generator=generator)
        weight = torch.nn.Parameter((weight.mul_(2 / hidden**0.5)).to(dtype))
        buffer = torch.empty(vocabulary, hidden).zero_()  # its pages exist before the peak counts
        weight.main_grad = buffer  # type: ignore[attr-defined]
        targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
        return cls(states.requires_grad_(), weight, targets)

    def head(self, chunk: int) -> None:
        """Run the product's head forward and backward."""
        logprobs, _ = selected_logprobs(
            self.hidden,
            self.weight,
            self.targets,
            temperature=TEMPERATURE,
            vocab_size=self.weight.size(0),
            tp_rank=0,
            group=None,
            chunk=chunk,
        )
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    def products(self) -> None:
        """Run the products alone."""
        with torch.no_grad():
            logits = self.hidden @ self.weight.t()
            del logits
            logits = self.hidden @ self.weight.t()
            logits @ self.weight
            logits.t() @ self.hidden


def fastest(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return the shortest CPU seconds of each way; ways take turns, so that load hits all."""
    taken = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            taken[name] = min(taken[name], time.process_time() - start)
    return taken


def main() -> None:
    """Print times, their ratio and memory in each precision."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--logprob-chunk-tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    platform, chunk = select_platform("cpu"), args.logprob_chunk_tokens
    tile = logit_tile(chunk, args.tokens, args.vocabulary, on_host=True)
    print(f"logits in blocks of {tile.rows} tokens x {tile.columns} ids: {tile.num_bytes} B")
    results = {}
    for name in args.precisions:
        work = Work.random(args.tokens, args.vocabulary, args.hidden, getattr(torch, name))
        platform.release_cached_memory()
        before = platform.memory().used_bytes
        platform.reset_peak_memory()
        work.head(chunk)
        peak = max(0, platform.peak_memory() - before)
        ways: dict[str, Callable[[], None]] = {
            "head": partial(work.head, chunk),
            "products": work.products,
        }
        found = fastest(ways, args.repeats)
        ratio = found["head"] / found["products"]
        print(
            f"{name:9s} head {found['head']:7.2f} s   products {found['products']:7.2f} s   "
            f"ratio {ratio:.3f}   peak {peak / 2**20:.0f} MiB"
        )
        results[name] = {**found, "ratio": ratio, "peak_bytes": peak}
    print_result("head", tile_bytes=tile.num_bytes, **results)


if __name__ == "__main__":
    main()
