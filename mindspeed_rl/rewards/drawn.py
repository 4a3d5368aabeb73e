"""Rewards drawn at random, for throughput runs: nothing is scored, and groups differ within."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_rl.rewards.types import RewardRequest, RewardResult

NAME = "drawn"


class DrawnScoring:
    """Samples of one pass and their rewards.

    Args:
        seed: Seed of the run.
        number: Number of the pass, equal on all ranks.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._seed, self._number = seed, number
        self._sample_ids: list[int] = []

    @property
    def num_done(self) -> int:
        return len(self._sample_ids)

    def add(self, request: RewardRequest) -> None:
        self._sample_ids.append(request.sample_id)

    def finish(self) -> list[RewardResult]:
        """Return rewards in [0, 1) that depend on seed, pass and sample alone."""
        return [self._result(sample_id) for sample_id in self._sample_ids]

    def _result(self, sample_id: int) -> RewardResult:
        message = struct.pack("<3q", self._seed, self._number, sample_id)
        digest = hashlib.blake2b(message, digest_size=8).digest()
        reward = int.from_bytes(digest, "little") / 2**64
        return RewardResult(sample_id, reward, {NAME: reward}, "ok", "")


class DrawnRewards:
    """What takes the place of a pool of reward workers.

    Args:
        seed: Seed of the run.
    """

    notices: tuple[str, ...] = ()

    def __init__(self, seed: int) -> None:
        self._seed, self._passes = seed, 0

    @contextmanager
    def scoring(self) -> Iterator[DrawnScoring]:
        """Open the scoring of the next pass."""
        self._passes += 1
        yield DrawnScoring(self._seed, self._passes)

    def close(self) -> None:
        """Do nothing, because there are no workers."""
