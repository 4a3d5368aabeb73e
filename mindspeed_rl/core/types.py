"""The values that flow through an RL step: prompts in, scored rollouts out.

Token ids are the only truth that crosses from rollout to training; text is
decoded for rewards and for people, and never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the data set, tokenised once.

    Attributes:
        index: position of the row in the filtered data set; equal on all ranks.
        token_ids: the prompt as the model reads it, chat template applied.
        text: the last user message, as a person would read it.
        answer: the reference answer handed to the rewards.
        metadata: whatever else the row of the data file holds.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine answered to one request.

    Attributes:
        token_ids: sampled ids, the stop token included when one was sampled.
        logprobs: log p(token) under the sampling distribution of the engine, one per token.
        finish_reason: ``"stop"`` (stop token sampled) or ``"length"`` (cut off); a request that an
            engine gave up (aborted, failed) is no completion.
        weights_version: the trainer's update count of the weights that sampled it.
        loss_mask: per token, whether the model sampled it (and is trained on it) or an environment
            wrote it, with log-prob 0; ``None``: all are the model's.
        experts: of every token, those that the engine's routers chose where it was predicted:
            [tokens, layers with experts, k] of one byte each (two above 256 experts); ``None``:
            they were not asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weights_version: int
    loss_mask: tuple[bool, ...] | None = None
    experts: bytes | None = None

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise RuntimeError(
                f"a completion ended with {self.finish_reason!r}; it must be one of "
                f"{', '.join(FINISH_REASONS)}"
            )
        if len(self.token_ids) != len(self.logprobs):
            raise RuntimeError(
                f"a completion has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs"
            )
        if self.loss_mask is not None and len(self.loss_mask) != len(self.token_ids):
            raise RuntimeError(
                f"a completion has {len(self.token_ids)} tokens but a loss mask of "
                f"{len(self.loss_mask)}"
            )

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the length limit."""
        return self.finish_reason == "length"

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the model sampled."""
        if self.loss_mask is None:
            return self.token_ids
        pairs = zip(self.token_ids, self.loss_mask, strict=True)
        return tuple(token for token, mine in pairs if mine)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored sample.

    Attributes:
        sample_id: prompt position in the step times group size plus sibling; equal on all ranks
            and independent of the layout.
        reward: the total reward; ``None`` when the reward function abstained.
        reward_parts: each reward function's own score, by name.
    """

    sample_id: int
    prompt: Prompt
    completion: Completion
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
