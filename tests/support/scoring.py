"""Rewards without processes: the product's scoring in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mindspeed_rl.rewards import RewardRequest, RewardResult, RewardSpec
from mindspeed_rl.rewards.scoring import WeightedReward, score_sample


def abstains(request: RewardRequest) -> None:
    """No verdict on anything."""


class OneByOne:
    """A pool whose samples come one by one and are scored at the end, by sample id.

    Attributes:
        arrived: the samples of the scoring that was opened last.
    """

    notices: tuple[str, ...] = ()

    @contextmanager
    def scoring(self) -> Iterator[Batch]:
        """Stands in for ``Scoring``; several may be open."""
        batch = Batch(self)
        self.arrived = batch.arrived
        yield batch

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """In the order of the requests."""
        raise NotImplementedError


class Batch:
    """The samples of one scoring."""

    num_done = 0  # all are scored at the end

    def __init__(self, pool: OneByOne) -> None:
        self._pool = pool
        self.arrived: list[RewardRequest] = []

    def add(self, request: RewardRequest) -> None:
        """Noted."""
        self.arrived.append(request)

    def finish(self) -> list[RewardResult]:
        """Scores in the order of arrival."""
        requests = sorted(self.arrived, key=lambda request: request.sample_id)
        results = {result.sample_id: result for result in self._pool.score(requests)}
        return [results[request.sample_id] for request in self.arrived]


class InlinePool(OneByOne):
    """What ``RewardPool`` is to a run; ``abstains`` is a reward besides the registered ones."""

    def __init__(self, specs: Sequence[str]) -> None:
        self._rewards = [
            WeightedReward("abstains", 1.0, abstains)
            if spec == "abstains"
            else WeightedReward.from_spec(RewardSpec.parse(spec))
            for spec in specs
        ]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Score in order."""
        return [score_sample(self._rewards, request) for request in requests]
