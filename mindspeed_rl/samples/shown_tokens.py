"""Keeps what training computes of the tokens of a few samples, for people to look at.

Advantages and log-probs of the trainer exist on the ranks of the last pipeline stage alone, each
with the tokens that it trains on. They are kept for the samples that a step shows, and gathered
when it is logged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey


class ShownToken(NamedTuple):
    """Values of one trained token: its advantage, and its log-prob by the trainer."""

    advantage: float
    logprob: float


def shown_samples(samples: Sequence[RolloutInfo], count: int) -> list[RolloutInfo]:
    """Return ``count`` samples at even distances, so that they are of different prompts. Pure."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


class ShownTokens:
    """The values of the tokens of the shown samples of a step, on this rank.

    A token is known by its position in its sequence, prompt included.
    """

    def __init__(self) -> None:
        self._wanted: frozenset[SampleKey] = frozenset()
        self._keys: dict[int, SampleKey] = {}
        self._found: dict[SampleKey, dict[int, ShownToken]] = {}

    def begin(self, shown: Iterable[RolloutInfo]) -> None:
        """Forget the last step; keep the values of these samples from now on. Local."""
        self._wanted = frozenset(s.key for s in shown)
        self._keys, self._found = {}, {}

    def follow(self, samples: Iterable[RolloutInfo]) -> None:
        """Learn by which ids the micro-batches of the step know their samples. Local."""
        self._keys = {s.sample_id: s.key for s in samples if s.key in self._wanted}

    def note(
        self, batches: Sequence[MicroBatch], logprobs: Sequence[torch.Tensor], *, counts: bool
    ) -> None:
        """Keep the values of an optimizer step. Local.

        Args:
            batches: Micro-batches of the step, with advantages.
            logprobs: [N] log-probs of the trainer for each micro-batch, in their order.
            counts: Whether this rank reports its tokens; another one has the same else.
        """
        if not counts or not self._keys:
            return
        for batch, values in zip(batches, logprobs, strict=True):
            rows = {i: self._keys[s] for i, s in enumerate(batch.sample_ids) if s in self._keys}
            if not rows:
                continue
            owners = batch.sequence_of.tolist()
            positions = (batch.positions[batch.trained] + 1).tolist()
            pairs = zip(batch.column("advantages").tolist(), values.tolist(), strict=True)
            for owner, position, pair in zip(owners, positions, pairs, strict=True):
                if owner in rows:
                    self._found.setdefault(rows[owner], {})[position] = ShownToken(*pair)

    def gather(self) -> Mapping[SampleKey, Mapping[int, ShownToken]]:
        """Return the values of all ranks by sample and position. Collective: the world."""
        result: dict[SampleKey, dict[int, ShownToken]] = {}
        for found in gather_objects(self._found):
            for key, values in found.items():
                result.setdefault(key, {}).update(values)
        return result

    @property
    def wanted(self) -> Collection[SampleKey]:
        """Keys of the samples whose values are kept."""
        return self._wanted
