"""1 when the response ended by itself and matches a pattern."""

from __future__ import annotations

import re
from functools import partial

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import BuiltInReward, RewardFunction, RewardRequest, RewardSettings

FORMAT_REGEX_KEY = "format_regex"


def _make(settings: RewardSettings) -> RewardFunction:
    """Make the reward with the pattern of ``--reward-format-regex``.

    Raises:
        UsageError: the pattern is not a regular expression.
    """
    pattern = settings.flags.reward_format_regex
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--reward-format-regex {pattern!r}: must be a regular expression of Python's re "
            f"({error})"
        ) from error
    return partial(format_reward, default=pattern or None)


def format_reward(request: RewardRequest, default: str | None = None) -> float:
    """Return 1.0 when the response ended by itself and matches a pattern, else 0.0.

    It ended by itself when ``finish_reason`` is ``"stop"``. The pattern is the regular
    expression in the data row's ``format_regex``, or else ``default``: it must match the whole
    response, and ``.`` matches newlines too. Without a pattern every response matches.

    Raises:
        UsageError: ``format_regex`` is not a regular expression.
    """
    if request.finish_reason != "stop":
        return 0.0
    pattern = request.metadata.get(FORMAT_REGEX_KEY, default)
    if pattern is None:
        return 1.0
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise UsageError(
            f"reward 'format': metadata {FORMAT_REGEX_KEY!r} of sample {request.sample_id} is "
            f"{pattern!r:.200}, must be a regular expression of Python's re ({error})"
        ) from error
    return float(compiled.fullmatch(request.response) is not None)


REWARD = BuiltInReward(_make, columns=(FORMAT_REGEX_KEY,))
