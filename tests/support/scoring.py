"""Rewards without processes: the product's scoring in the calling thread."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.rewards import RewardRequest, RewardResult, RewardSpec
from mindspeed_rl.rewards.scoring import WeightedReward, score_sample


def abstains(request: RewardRequest) -> None:
    """No verdict on anything (R43)."""


class InlinePool:
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
