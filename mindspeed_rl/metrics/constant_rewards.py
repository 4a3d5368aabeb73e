"""Warns of rewards from which nothing can be learned: all the same, timed out, or none at all."""

from __future__ import annotations

import math

MANY = 0.5  # share of a step's samples from which on lost rewards are told


class ConstantRewards:
    """Counts the steps in a row whose rewards are all one number.

    Args:
        patience: Number of such steps in a row after which to warn; 0 never warns.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._steps = 0

    def see(self, least: float, most: float) -> str:
        """Count one more step.

        Args:
            least: Smallest reward of the step; NaN when there is none.
            most: Largest reward of the step.

        Returns:
            A warning when the number of steps reaches ``patience``; otherwise an empty string.
        """
        constant = least == most or math.isnan(least)
        self._steps = self._steps + 1 if constant else 0
        if not self._patience or self._steps != self._patience:
            return ""
        observed = "no sample has a reward" if math.isnan(least) else f"every reward is {least:g}"
        return (
            f"rewards: in each of the last {self._steps} steps all samples had the same one; now "
            f"{observed}. Nothing is learned from it; look at the parts of the reward and at the "
            "responses in the dumped rollouts"
        )


class MissingRewards:
    """Tells at once, from the first step on, when most rewards of a step time out or abstain."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def see(self, timeout_rate: float, abstained: float) -> list[str]:
        """Return a warning for each sort of loss that a step is the first to have.

        Args:
            timeout_rate: Share of the samples whose reward took longer than its limit.
            abstained: Share of the samples without a reward.
        """
        found = {
            "timeout": (
                timeout_rate,
                "of the rewards hit --reward-timeout-s, so that their samples got "
                "--reward-timeout-score; raise the limit, or fix the reward function",
            ),
            "abstained": (
                abstained,
                "of the samples have no reward, as every function abstained (None) or failed; "
                "nothing is learned from them",
            ),
        }
        new = [
            name for name, (share, _) in found.items() if share >= MANY and name not in self._told
        ]
        self._told.update(new)
        return [f"rewards: {found[name][0]:.0%} {found[name][1]}" for name in new]
