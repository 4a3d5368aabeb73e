"""Times the hand-over of samples from one stage to the next, on gloo ranks of this machine.

    python tools/bench/dispatch.py --workers 4 --megabytes 16 64

ours        the workers share the sample table, plan, and move the samples among themselves
            (TensorCache, Redistribution)
controller  rank 0 fetches every worker's samples, makes one batch of them and sends every worker
            its part, one after the other, as a single controller does
floor       an all-to-all of the same ids and one of the log-probs, nothing packed, planned or
            checked

All ways hand over the same 1024 samples of log-normal lengths, with an id and a log-prob per token,
each to the next worker, and the received samples are compared bit by bit. Seconds are medians of
the slowest worker; bytes are those of all samples and those that pass through the busiest rank. The
last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import numpy as np
import torch
import torch.distributed as dist

from bench.jobs import parser_of, print_result, slowest, spawn
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.parallel.small_collectives import all_reduce_sum
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.device_cache import TensorCache
from mindspeed_rl.samples.exchange import OwnerRanks, Redistribution, plan_hops
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey

NUM_SAMPLES = 1024
TOKEN_BYTES = 8  # a token id and a log-prob
TABLE_WORDS = 9  # int64 numbers per sample in the table that all workers get
VERSION = 1
VOCAB = 50_000
COLUMNS = (TOKEN_IDS, ROLLOUT_LOGPROBS)
Payload = list[torch.Tensor]  # ids and log-probs, one sample after the other


class DispatchRank:
    """One rank with its samples, and the ways to hand them to the next rank.

    Args:
        rank: Rank of this worker.
        workers: Number of workers.
        megabytes: Size of all samples together (2^20 bytes).
    """

    def __init__(self, rank: int, workers: int, megabytes: int) -> None:
        self._rank, self._workers, self._step = rank, workers, 0
        drawn = np.random.default_rng(megabytes).lognormal(0.0, 0.8, NUM_SAMPLES)
        tokens = megabytes * 2**20 / TOKEN_BYTES
        self._lengths = [max(1, int(n)) for n in drawn * tokens / drawn.sum()]
        self._mine = self.samples_of(rank)
        self._before = (rank - 1) % workers
        self._cache = TensorCache(torch.device("cpu"))
        self.num_bytes = TOKEN_BYTES * sum(self._lengths)

    def samples_of(self, worker: int) -> Payload:
        """Return the samples that a worker makes."""
        ids = range(worker, NUM_SAMPLES, self._workers)
        tokens = torch.cat(
            [torch.arange(7919 * i, 7919 * i + self._lengths[i]) % VOCAB for i in ids]
        )
        return [tokens.to(torch.int32), -tokens.to(torch.float32) / VOCAB]

    def prepare(self) -> None:
        """Put the samples of a step into the cache, as an engine does."""
        self._step += 1
        ids = range(self._rank, NUM_SAMPLES, self._workers)
        keys = [SampleKey(self._step, i) for i in ids]
        lengths = [self._lengths[i] for i in ids]
        self._cache.begin_step(self._step)
        for column, values in zip(COLUMNS, self._mine, strict=True):
            self._cache.put(column, keys, values, lengths, [VERSION] * len(keys))

    def ours(self) -> Payload:
        """Share the table, plan, exchange. Collective: the world."""
        all_reduce_sum(torch.zeros(NUM_SAMPLES * TABLE_WORDS, dtype=torch.int64), None)
        makers = [i % self._workers for i in range(NUM_SAMPLES)]
        wanted = [(maker + 1) % self._workers for maker in makers]
        layout = ParallelLayout.build(world=self._workers, stages=even_stages(1))
        hops = plan_hops(OwnerRanks(makers), wanted, layout, (0,), self._rank)
        samples = [
            RolloutInfo(i, 0, n, n, True, VERSION, maker, 0.0, key=SampleKey(self._step, i))
            for i, (n, maker) in enumerate(zip(self._lengths, makers, strict=True))
        ]
        moved = Redistribution(self._cache, samples, COLUMNS, hops)
        moved.run(lambda axis: None)
        ids = range(self._before, NUM_SAMPLES, self._workers)
        return [torch.cat([moved.read(i, column) for i in ids]) for column in COLUMNS]

    def controller(self) -> Payload:
        """Move everything through one batch on rank 0. Collective: the world."""
        sizes = [sum(self._lengths[w :: self._workers]) for w in range(self._workers)]
        arrived: Payload = []
        for mine in self._mine:
            if self._rank:
                part = torch.empty(sizes[self._before], dtype=mine.dtype)
                dist.send(mine, 0)
                dist.recv(part, 0)
            else:
                batch = torch.empty(sum(sizes), dtype=mine.dtype)
                parts = [batch[sum(sizes[:w]) : sum(sizes[: w + 1])] for w in range(len(sizes))]
                parts[0].copy_(mine)
                for worker in range(1, self._workers):
                    dist.recv(parts[worker], worker)
                for worker in range(1, self._workers):
                    dist.send(parts[worker - 1], worker)
                part = parts[self._before].clone()
            arrived.append(part)
        return arrived

    def floor(self) -> Payload:
        """Move the bytes with one all-to-all per column. Collective: the world."""
        arrived: Payload = []
        expected = sum(self._lengths[self._before :: self._workers])
        for mine in self._mine:
            part = torch.empty(expected, dtype=mine.dtype)
            received, sent = [0] * self._workers, [0] * self._workers
            received[self._before] = expected
            sent[(self._rank + 1) % self._workers] = mine.numel()
            dist.all_to_all_single(part, mine, received, sent)
            arrived.append(part)
        return arrived


def race(args: argparse.Namespace, megabytes: int) -> dict[str, Any]:
    """Time all ways at one size on this rank. Collective: the world.

    Raises:
        RuntimeError: The samples that arrived are not those that were sent.
    """
    rank = dist.get_rank()
    worker = DispatchRank(rank, args.workers, megabytes)
    ways: dict[str, Callable[[], Payload]] = {
        "ours": worker.ours, "controller": worker.controller, "floor": worker.floor,
    }  # fmt: skip
    expected = worker.samples_of((rank - 1) % args.workers)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(args.repeats + 1):  # the first run of each way is checked and not timed
        for way, hand_over in ways.items():
            worker.prepare()
            dist.barrier()
            began = time.perf_counter()
            arrived = hand_over()
            dist.barrier()
            if repeat:
                seconds[way].append(time.perf_counter() - began)
            elif not all(map(torch.equal, arrived, expected)):
                raise RuntimeError(f"{way}: rank {rank} has other samples than were sent")
    taken_s = slowest({way: statistics.median(taken) for way, taken in seconds.items()})
    size, share = worker.num_bytes, worker.num_bytes // args.workers
    busiest = {"ours": 2 * share, "controller": 2 * (size - share), "floor": 2 * share}
    return {
        "workers": args.workers, "bytes": size, "seconds": taken_s, "busiest_bytes": busiest,
        "controller_over_ours": taken_s["controller"] / taken_s["ours"],
        "ours_over_floor": taken_s["ours"] / taken_s["floor"],
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Time all sizes on this rank; rank 0 prints. Collective: the world."""
    records = [race(args, megabytes) for megabytes in args.megabytes]
    if dist.get_rank():
        return
    rows = [["way", "MB", "seconds", "x ours", "busiest rank MB"]]
    for record in records:
        for way, taken in record["seconds"].items():
            ratio, busiest = taken / record["seconds"]["ours"], record["busiest_bytes"][way]
            size = f"{record['bytes'] / 1e6:.1f}"
            rows.append([way, size, f"{taken:.4f}", f"{ratio:.2f}", f"{busiest / 1e6:.1f}"])
    print("\n".join(aligned(rows)))
    print_result("dispatch", sizes=records)


def main() -> None:
    """Start the workers and wait for them."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=4, help="ranks (4)")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[16, 64], help="of all samples (16 64)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed hand-overs of each (5)")
    args = parser.parse_args()
    if args.workers < 2 or min(args.megabytes) < 1 or args.repeats < 1:
        parser.error("at least 2 --workers, 1 in --megabytes and 1 in --repeats")
    spawn(run, args, args.workers)


if __name__ == "__main__":
    main()
