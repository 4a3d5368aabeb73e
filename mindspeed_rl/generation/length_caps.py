"""Caps responses to training prompts by the lengths of earlier ones, and measures what it cuts.

A response that a cap cuts counts as truncated. Its length enters the history, so the next cap of
its prompt is larger by the factor; what it would have become is not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.metrics.metric_set import Mean, MetricSet
from mindspeed_rl.samples.lengths import LengthHistory
from mindspeed_rl.samples.rollout_info import RolloutInfo


@dataclass(frozen=True, slots=True)
class LengthCaps:
    """The rule of ``--response-length-cap-factor``; equal on all ranks.

    Attributes:
        factor: Most tokens of a response over those of the longest known one to its prompt.
        floor: Least tokens of a cap.
        limit: Most tokens of any response.
    """

    factor: float
    floor: int
    limit: int

    def cap(self, longest: int | None) -> int:
        """Return the most tokens of a response whose longest known one is ``longest``."""
        if longest is None:
            return self.limit
        return min(self.limit, max(self.floor, int(self.factor * longest)))

    def of(self, prompts: Sequence[Prompt], history: LengthHistory) -> list[int]:
        """Return the most tokens of the response to each prompt. Local."""
        return [self.cap(history.longest(prompt.index)) for prompt in prompts]

    def metrics(self, groups: Sequence[Sequence[RolloutInfo]], history: LengthHistory) -> MetricSet:
        """Return what the caps of a step cut, equal on all ranks. Local.

        The tokens that were left out are given as the history expects them, which is too few, as
        it has cut lengths as well, and as they would be at most, up to the limit.

        Args:
            groups: Samples of the step by prompt.
            history: Lengths of earlier responses, from which the caps were.
        """
        samples = [sample for group in groups for sample in group]
        cut = [s for s in samples if self._cut(s)]
        tokens = sum(s.num_tokens for s in samples)
        expected = sum(
            history.expected(s.prompt_index, s.num_tokens, self.limit) - s.num_tokens for s in cut
        )
        most = sum(self.limit - s.num_tokens for s in cut)
        at_limit = sum(not s.stopped for s in samples) - len(cut)
        metrics = MetricSet(
            {
                "cap/cut_fraction": Mean(float(len(cut)), float(len(samples))),
                "cap/limit_fraction": Mean(float(at_limit), float(len(samples))),
                "cap/cut_groups": Mean.of(float(any(map(self._cut, group))) for group in groups),
                "cap/left_out_expected": Mean(float(expected), float(tokens + expected)),
                "cap/left_out_most": Mean(float(most), float(tokens + most)),
            }
        )
        metrics["cap/cut_reward"] = Mean.of(s.reward for s in cut if not math.isnan(s.reward))
        return metrics

    def _cut(self, sample: RolloutInfo) -> bool:
        """Whether a cap ended the response, and neither a stop token nor the limit."""
        return sample.is_incomplete(self.limit)


def length_caps(config: RLRunConfig) -> LengthCaps | None:
    """Return the caps that the flags ask for; ``None``: responses have no caps."""
    flags = config.balance
    if not flags.response_length_cap_factor:
        return None
    return LengthCaps(
        flags.response_length_cap_factor,
        flags.response_length_cap_floor,
        config.rollout.rollout_max_response_length,
    )
