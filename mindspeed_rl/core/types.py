"""The values that pass through a step: prompts go in, sequences to train on come out.

Responses cross from rollout to training as token ids only; text is decoded from them for rewards
and for people, and is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question of the data set, tokenised once.

    Attributes:
        index: Position of the row in the filtered data set; equal on all ranks.
        token_ids: Tokens of the prompt as the model reads it, chat template applied.
        text: Last user message, as a person would read it.
        answer: Reference answer for the rewards.
        metadata: All other fields of the row in the data file.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EarlyLogprobs:
    """Log-probs of a response from the passes that ran while other engines still generated.

    Attributes:
        old: Log p(token) under the policy, as fp32; empty: its pass comes later.
        reference: Log p(token) under the reference, as fp32; empty: its pass comes later, or there
            is none.
    """

    old: bytes = b""
    reference: bytes = b""


@dataclass(frozen=True, slots=True)
class Completion:
    """The response of an engine to one request.

    Attributes:
        token_ids: Tokens of the response, the stop token included when one was sampled.
        logprobs: Log p(token) under the sampling distribution of the engine, one per token.
        finish_reason: ``"stop"`` (stop token sampled) or ``"length"`` (cut off); a request that an
            engine gave up (aborted, failed) has no completion.
        weights_version: Number of trainer updates in the weights that sampled the response.
        loss_mask: Per token, whether the model sampled it (and is trained on it) or an environment
            wrote it, with log-prob 0; ``None``: the model sampled all tokens.
        experts: Experts that the engine's routers chose when each token was predicted: [tokens,
            layers with experts, k] of one byte each (two above 256 experts); ``None``: they were
            not asked for.
        early: What passes of the trainer computed while other engines still generated; ``None``:
            all of them come later.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    weights_version: int
    loss_mask: tuple[bool, ...] | None = None
    experts: bytes | None = None
    early: EarlyLogprobs | None = None

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
        """The tokens that the model sampled, without those of an environment."""
        if self.loss_mask is None:
            return self.token_ids
        pairs = zip(self.token_ids, self.loss_mask, strict=True)
        return tuple(token for token, mine in pairs if mine)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The scored response to a prompt, from which the policy learns.

    Attributes:
        sample_id: Position of the prompt in the step times the group size, plus the position in the
            group; equal on all ranks and independent of the layout.
        reward: Total reward; ``None`` when the reward function abstained.
        reward_parts: Score of each reward function, by name.
    """

    sample_id: int
    prompt: Prompt
    completion: Completion
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on: local, on the host or a device.

    Attributes:
        sample_id: Id of the sample, equal on all ranks.
        token_ids: [length] int64, prompt and response.
        num_prompt_tokens: Number of tokens that are read but not trained on; at least 1.
        columns: Columns of the trained tokens, [num_trained, ...] by name.
        token_after: Token after the last one, which is trained on but not read; ``None`` where the
            sequence ends.
        loss_mask: [length - num_prompt_tokens] bool on the host, which tokens after the prompt are
            trained on; ``None``: all.
    """

    sample_id: int
    token_ids: torch.Tensor
    num_prompt_tokens: int
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_after: int | None = None
    loss_mask: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return int(self.token_ids.numel())

    @property
    def num_trained(self) -> int:
        """Number of tokens that are trained on."""
        behind = self.length - self.num_prompt_tokens
        if self.loss_mask is not None:
            assert self.loss_mask.numel() == behind, "one entry per token behind the prompt"
            behind = int(self.loss_mask.sum())
        return behind + (self.token_after is not None)
