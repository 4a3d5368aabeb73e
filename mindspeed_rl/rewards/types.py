"""The inputs of rewards (the flags of the run, a sample) and the result of scoring a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed_rl.config.rewards import RewardConfig

RewardStatus = Literal["ok", "error", "timeout"]


class RewardError(RuntimeError):
    """Rewards cannot be trusted: workers do not start, or too many functions raise."""


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """What rewards and their workers know of the run: the first message to every worker.

    Attributes:
        flags: All reward flags; each reward reads its own.
        max_response_tokens: ``--rollout-max-response-length``; 0: unknown.
    """

    flags: RewardConfig = field(default_factory=RewardConfig)
    max_response_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One sample to score.

    Attributes:
        sample_id: As in `mindspeed_rl.core.types.Rollout`; scores are matched and logged by it.
        prompt: Last user message.
        response: Decoded response, special tokens removed.
        answer: Reference answer.
        finish_reason: ``"stop"`` (ended by a stop token) or ``"length"`` (cut off).
        num_response_tokens: Number of sampled tokens, the stop token included.
        metadata: Other columns of the data row; values must be picklable.
    """

    sample_id: int
    prompt: str
    response: str
    answer: str
    finish_reason: str
    num_response_tokens: int
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The score of one sample.

    Attributes:
        sample_id: Sample id of the request.
        reward: Weighted sum of the parts; the configured score on a timeout; ``None`` when every
            function abstained or on an error. ``None`` is left out of the group's mean.
        parts: Unweighted score by label of the function; functions that abstained are missing.
        status: ``"ok"``, ``"error"`` (a function raised or returned nonsense, or its worker died)
            or ``"timeout"``.
        detail: Traceback or reason when the status is not ``"ok"``.
    """

    sample_id: int
    reward: float | None
    parts: dict[str, float]
    status: RewardStatus
    detail: str


RewardFunction = Callable[[RewardRequest], float | None]


@dataclass(frozen=True, slots=True)
class BuiltInReward:
    """The declaration ``REWARD`` of a module of ``rewards/builtin``.

    The reward has the module's name; the first line of the module's docstring describes it. Its
    flags are the fields of `RewardConfig` that begin with ``reward_NAME_``.

    Attributes:
        make: Makes the function of a run.
        columns: Columns of a data row that it reads, besides prompt and answer.
        verdict: Rank of the reward as a verdict, of which full marks mean a right response; the
            smallest rank that scored is believed; 0: it is no verdict.
        warm_up: Runs the slow imports that the reward would otherwise do at its first sample.
    """

    make: Callable[[RewardSettings], RewardFunction]
    columns: tuple[str, ...] = ()
    verdict: int = 0
    warm_up: Callable[[], None] | None = None
