"""The ways of `dispatch.py` to hand the samples of a stage to the workers of the next one.

Every worker makes the samples of one step, in flat tensors as an engine would: ids and log-probs.
The next stage wants all samples of worker i on worker i (``agree``) or on worker i + 1 (``move``).
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mindspeed_rl.parallel.layout import ParallelLayout
from mindspeed_rl.parallel.small_collectives import sum_over_ranks
from mindspeed_rl.parallel.stages import even_stages
from mindspeed_rl.samples.device_cache import LOGPROBS, TOKENS, TensorCache
from mindspeed_rl.samples.exchange import GroupWire, Parcel, Redistribution
from mindspeed_rl.samples.rollout_info import SampleKey
from mindspeed_rl.samples.routes import Holders, plan_legs

NUM_SAMPLES = 1024
TOKEN_BYTES = 8  # an id and a log-prob
TABLE_WORDS = 9  # int64 of a sample in the table that all workers learn
VERSION = 1
LIMIT = timedelta(minutes=5)
VOCAB = 50_000
AGREE, MOVE = 0, 1  # by how many workers samples shift

Payload = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of a step, as every worker knows them.

    Attributes:
        workers: W.
        megabytes: of all samples together (2^20 bytes).
        step: of the cache; every hand-over is a step of its own.
    """

    workers: int
    megabytes: int
    step: int = 1

    def at(self, step: int) -> Batch:
        """The same samples in another step."""
        return replace(self, step=step)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample: log-normal, so that workers have unequal shares."""
        return _drawn(self.megabytes)

    def of_worker(self, worker: int) -> list[int]:
        """The samples that a worker makes."""
        return list(range(worker, NUM_SAMPLES, self.workers))

    def tensors(self, worker: int) -> Payload:
        """What a worker makes: one sample after the other."""
        lengths = self.lengths
        mine = self.of_worker(worker)
        vocabulary = np.arange(VOCAB, dtype=np.int32)
        ids = [np.resize(np.roll(vocabulary, 7919 * i), lengths[i]) for i in mine]
        tokens = np.concatenate(ids)
        return {"tokens": tokens, "logprobs": -tokens.astype(np.float32) / VOCAB}


@cache
def _drawn(megabytes: int) -> tuple[int, ...]:
    drawn = np.random.default_rng(megabytes).lognormal(0.0, 0.8, NUM_SAMPLES)
    tokens = megabytes * 2**20 / TOKEN_BYTES
    return tuple(max(1, int(n)) for n in drawn * tokens / drawn.sum())


class Worker:
    """A worker. Times are of the machine's monotonic clock.

    The first W of all workers take part in a hand-over of W.

    Args:
        rank: of this worker.
        world: all workers.
    """

    def __init__(self, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = rank, world
        self._groups: dict[int, dist.ProcessGroup | None] = {world: None}
        self._cache = TensorCache(torch.device("cpu"))
        self._made: Payload = {}
        self._made_of = (0, 0)
        self._taken: dict[str, list[torch.Tensor]] = {}

    def join(self, store: str, sizes: Sequence[int]) -> None:
        """Meet the others; ``sizes``: every W. Collective: all workers."""
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, self.world),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world,
            timeout=LIMIT,
        )
        for size in sizes:
            if size not in self._groups:
                group = dist.new_group(range(size))
                self._groups[size] = group if self.rank < size else None

    def make(self, batch: Batch) -> None:
        """The samples of a stage, in the cache and beside it."""
        if self._made_of != (batch.workers, batch.megabytes):
            self._made_of = (batch.workers, batch.megabytes)
            self._made = batch.tensors(self.rank)
        mine = batch.of_worker(self.rank)
        keys = [SampleKey(batch.step, i) for i in mine]
        lengths = [batch.lengths[i] for i in mine]
        self._cache.begin_step(batch.step)
        for column in (TOKENS, LOGPROBS):
            values = torch.from_numpy(self._made[column.name])
            self._cache.put(column, keys, values, lengths, [VERSION] * len(mine))

    # -- through the controller ----------------------------------------------------------------

    def give(self) -> Payload:
        """The tensors, for the object store."""
        return self._made

    def give_saved(self) -> bytes:
        """The tensors as torch.save writes them."""
        return saved(self._made)

    def take(self, payload: Payload) -> float:
        """Into this worker's own memory, as it would go to a device; when that was done."""
        self._taken = {name: [torch.from_numpy(a.copy())] for name, a in payload.items()}
        return time.monotonic()

    def take_saved(self, payload: bytes) -> float:
        """The same from torch.save's bytes."""
        loaded = torch.load(io.BytesIO(payload), weights_only=True)
        self._taken = {name: [tensor] for name, tensor in loaded.items()}
        return time.monotonic()

    # -- between the workers -------------------------------------------------------------------

    def redistribute(self, batch: Batch, shift: int) -> tuple[float, float]:
        """Learn the table, plan, move: when it began and when it was done. Collective."""
        began = time.monotonic()
        group, workers = self._groups[batch.workers], batch.workers
        sum_over_ranks(torch.zeros(NUM_SAMPLES * TABLE_WORDS, dtype=torch.int64), group)
        makers = [i % workers for i in range(NUM_SAMPLES)]
        destinations = [(m + shift) % workers for m in makers]
        layout = ParallelLayout.build(world=workers, stages=even_stages(1))
        legs = plan_legs(Holders(makers), destinations, layout, (0,), self.rank)
        lengths = batch.lengths
        parcels = [Parcel(SampleKey(batch.step, i), VERSION, n) for i, n in enumerate(lengths)]
        moved = Redistribution(self._cache, parcels, (TOKENS, LOGPROBS), legs)
        moved.run(GroupWire(lambda axis: group))
        mine = batch.of_worker((self.rank - shift) % workers)
        self._taken = {c.name: [moved.read(i, c) for i in mine] for c in (TOKENS, LOGPROBS)}
        return began, time.monotonic()

    def spmd(self, batches: Sequence[Batch], shift: int) -> list[tuple[float, float]]:
        """One hand-over after the other, each begun together without a controller. Collective."""
        times = []
        for batch in batches:
            self.make(batch)
            dist.barrier(group=self._groups[batch.workers])
            times.append(self.redistribute(batch, shift))
        return times

    def bare(self, batch: Batch, repeats: int) -> list[tuple[float, float]]:
        """The all-to-all of the wire alone, on tensors of the same sizes. Collective."""
        group, workers = self._groups[batch.workers], batch.workers
        share = batch.megabytes * 2**20 // workers // 4
        outgoing = torch.ones(share, dtype=torch.int32)
        incoming = torch.empty_like(outgoing)
        received = [share * (rank == (self.rank - 1) % workers) for rank in range(workers)]
        sent = [share * (rank == (self.rank + 1) % workers) for rank in range(workers)]
        times = []
        for _ in range(repeats):
            dist.barrier(group=group)
            began = time.monotonic()
            dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
            times.append((began, time.monotonic()))
        return times

    def check(self, batch: Batch, shift: int) -> None:
        """Whether this worker has what the next stage wants, bit for bit."""
        expected = batch.tensors((self.rank - shift) % batch.workers)
        for name, values in expected.items():
            got = torch.cat(self._taken[name]).numpy()
            assert np.array_equal(got, values), (self.rank, name, batch)
        self._taken = {}


def saved(payload: Payload) -> bytes:
    """By torch.save."""
    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(values) for name, values in payload.items()}, buffer)
    return buffer.getvalue()


def joined(parts: Sequence[Payload]) -> Payload:
    """The batch that a controller makes of all answers."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def cut(batch: Payload, sizes: Sequence[int], worker: int) -> Payload:
    """The part of a worker."""
    start = sum(sizes[:worker])
    return {name: values[start : start + sizes[worker]] for name, values in batch.items()}


def memcpy_bytes_per_s(megabytes: int) -> float:
    """Speed of a plain copy in this process, the best of three."""
    source = np.ones(megabytes * 2**20, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(3):
        began = time.monotonic()
        np.copyto(target, source)
        best = min(best, time.monotonic() - began)
    return len(source) / best
