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
        arrived: the samples of the last scoring.
    """

    notices: tuple[str, ...] = ()

    @contextmanager
    def scoring(self) -> Iterator[OneByOne]:
        """Stands in for ``Scoring``."""
        self.arrived: list[RewardRequest] = []
        yield self

    @property
    def num_done(self) -> int:
        """None: all are scored at the end."""
        return 0

    def add(self, request: RewardRequest) -> None:
        """Noted."""
        self.arrived.append(request)

    def finish(self) -> list[RewardResult]:
        """Scores in the order of arrival."""
        requests = sorted(self.arrived, key=lambda request: request.sample_id)
        results = {result.sample_id: result for result in self.score(requests)}
        return [results[request.sample_id] for request in self.arrived]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """In the order of the requests."""
        raise NotImplementedError


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
