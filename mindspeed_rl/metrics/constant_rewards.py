"""Warns of a reward that is the same for all samples, from which nothing can be learned."""

from __future__ import annotations

import math


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
