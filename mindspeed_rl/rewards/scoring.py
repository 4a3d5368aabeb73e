"""Scoring one sample: call the functions, check what they return, add up. No processes here."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.rewards.registry import RewardSpec, resolve_reward
from mindspeed_rl.rewards.types import RewardFunction, RewardRequest, RewardResult

MAX_DETAIL_CHARS = 4000


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A resolved reward: its function, its weight, its label in `RewardResult.parts`."""

    label: str
    weight: float
    function: RewardFunction

    @classmethod
    def from_spec(cls, spec: RewardSpec) -> WeightedReward:
        """Resolve ``spec`` in this process; raises `ValueError` as `resolve_reward` does."""
        return cls(spec.label, spec.weight, resolve_reward(spec))


def check_reward(label: str, value: object) -> float | None:
    """Accept a finite real number (bool, int, float, numpy scalar) or ``None`` (R43).

    Raises:
        ValueError: anything else, with the function and the value named.
    """
    if value is None:
        return None
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ValueError(
        f"reward {label!r} returned {value!r:.200} ({type(value).__name__}); "
        "must be a finite number, or None to abstain"
    )


def score_sample(rewards: Sequence[WeightedReward], request: RewardRequest) -> RewardResult:
    """Score one sample in this process, without limits.

    Whatever a function raises becomes status ``"error"`` and no reward, never a 0 (R41): also a
    ``BaseException`` such as ``SystemExit`` or the timeout exception of math-verify.

    Raises:
        MemoryError: a function ran out of memory; the process is not to be trusted afterwards.
        KeyboardInterrupt: the user's.
    """
    parts: dict[str, float] = {}
    total = 0.0
    for reward in rewards:
        try:
            part = check_reward(reward.label, reward.function(request))
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException:
            detail = traceback.format_exc()[-MAX_DETAIL_CHARS:]
            return RewardResult(request.sample_id, None, parts, "error", detail)
        if part is not None:
            parts[reward.label] = part
            total += reward.weight * part
    return RewardResult(request.sample_id, total if parts else None, parts, "ok", "")
