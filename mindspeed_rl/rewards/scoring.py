"""Scores one sample in this process: calls the functions, checks their results, and adds up."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl.config.reward_spec import RewardSpec
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.registry import resolve_reward
from mindspeed_rl.rewards.types import (
    RewardFunction,
    RewardRequest,
    RewardResult,
    RewardSettings,
)

if TYPE_CHECKING:
    from mindspeed_rl.data.prompts import PromptDataset

MAX_DETAIL_CHARS = 4000
ROW_REWARDS_KEY = RewardSettings().flags.reward_key


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A resolved reward: its function, its weight, its label in `RewardResult.parts`."""

    label: str
    weight: float
    function: RewardFunction

    @classmethod
    def from_spec(cls, spec: RewardSpec, settings: RewardSettings | None = None) -> WeightedReward:
        """Resolve ``spec`` in this process; raises `UsageError` as `resolve_reward` does."""
        return cls(spec.label, spec.weight, resolve_reward(spec, settings))


def check_reward(label: str, value: object) -> float | None:
    """Accept a finite real number (bool, int, float, numpy scalar) or ``None``.

    Raises:
        UsageError: anything else, with the function and the value named.
    """
    if value is None:
        return None
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise UsageError(
        f"reward {label!r} returned {_shown(value)} ({type(value).__name__}); "
        "must be a finite number, or None to abstain"
    )


def _shown(value: object) -> str:
    """Return a short form of any value: its own may recurse without end, or fail."""
    try:
        return f"{value!r:.200}"
    except Exception as error:
        return f"a value whose repr fails ({type(error).__name__})"


def row_weights(
    weights: Mapping[str, float], metadata: Mapping[str, Any], row_key: str = ROW_REWARDS_KEY
) -> dict[str, float]:
    """Return the weights of the rewards of one data row, by label.

    Args:
        weights: Weights of the run, by label.
        metadata: Metadata of the row. The field ``row_key`` may name one reward, list several, or
            map them to weights of their own; the others then do not score this row.
            Without the field all rewards score it.
        row_key: Name of the field.

    Raises:
        UsageError: the field is something else, or names a reward that the run does not have.
    """
    value = metadata.get(row_key)
    if value is None:
        return dict(weights)
    chosen: dict[str, Any] = {}
    if isinstance(value, str):
        chosen = {value: weights.get(value)}
    elif isinstance(value, Mapping):
        chosen = dict(value)
    elif isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        chosen = {name: weights.get(name) for name in value}
    unknown = [name for name in chosen if name not in weights]
    good = all(isinstance(w, int | float) and math.isfinite(w) for w in chosen.values())
    if not chosen or unknown or not good:
        raise UsageError(
            f"--reward-key {row_key!r} gives {value!r:.200}: must name one or several of the "
            f"rewards {', '.join(weights)}, or map them to finite weights; add the reward to "
            "--reward-function or fix the row"
        )
    return {name: float(weight) for name, weight in chosen.items()}


def check_row_rewards(
    specs: Sequence[RewardSpec], datasets: Sequence[PromptDataset], row_key: str
) -> None:
    """Check that every row that names its rewards names rewards of the run. Local.

    Raises:
        UsageError: the message names the data set, the prompt and the field.
    """
    weights = {spec.label: spec.weight for spec in specs}
    for dataset in datasets:
        if row_key not in dataset.metadata_keys:
            continue
        for question in dataset.questions():
            try:
                row_weights(weights, question.metadata, row_key)
            except UsageError as error:
                raise UsageError(
                    f"{dataset.source}, prompt {question.text!r:.100}: {error}"
                ) from None


def is_scored_by(
    label: str, weights: Mapping[str, float], request: RewardRequest, row_key: str
) -> bool:
    """Whether a reward scores a sample; false when its row is at fault."""
    try:
        return label in row_weights(weights, request.metadata, row_key)
    except UsageError:  # score_sample reports it
        return False


def score_sample(
    rewards: Sequence[WeightedReward], request: RewardRequest, row_key: str = ROW_REWARDS_KEY
) -> RewardResult:
    """Score one sample in this process, without limits.

    Whatever a function raises becomes status ``"error"`` and no reward, never a 0: also a
    ``BaseException`` such as ``SystemExit`` or the timeout exception of math-verify.

    Raises:
        MemoryError: a function ran out of memory; the process is not to be trusted afterwards.
        KeyboardInterrupt: the user interrupted the run.
    """
    parts: dict[str, float] = {}
    total = 0.0
    try:
        weights = row_weights({r.label: r.weight for r in rewards}, request.metadata, row_key)
    except UsageError as error:
        return RewardResult(request.sample_id, None, parts, "error", str(error))
    for reward in rewards:
        if reward.label not in weights:
            continue
        try:
            part = check_reward(reward.label, reward.function(request))
        except (MemoryError, KeyboardInterrupt):
            raise
        except BaseException:
            detail = traceback.format_exc()[-MAX_DETAIL_CHARS:]
            return RewardResult(request.sample_id, None, parts, "error", detail)
        if part is not None:
            parts[reward.label] = part
            total += weights[reward.label] * part
    return RewardResult(request.sample_id, total if parts else None, parts, "ok", "")
