"""1 when the last number is the answer, within a tolerance."""

from __future__ import annotations

import math
import re

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.answers import NUMBER
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

TOLERANCE_KEY = "tolerance"
DEFAULT_TOLERANCE = 1e-6

_NUMBER = re.compile(rf"{NUMBER}(?:[eE][-+]?[0-9]+)?")


def numeric_match_reward(request: RewardRequest) -> float:
    """Return 1.0 when the last number of the response is the answer within a tolerance, else 0.0.

    Equal means |response - answer| <= tolerance x max(1, |answer|); the tolerance is the data row's
    ``tolerance``, or 1e-6. Thousands commas and exponents are read.

    Raises:
        UsageError: the answer is not one number, or the tolerance is not a number of at least 0.
    """
    answer = _NUMBER.fullmatch(request.answer.strip())
    if answer is None:
        raise UsageError(
            f"reward 'numeric_match': the reference answer {request.answer!r:.200} of sample "
            f"{request.sample_id} is not a number; fix the row, or use 'math' or 'exact_match'"
        )
    tolerance = _tolerance(request)
    found = _NUMBER.findall(request.response)
    if not found:
        return 0.0
    wanted, given = _value(answer.group()), _value(found[-1])
    if math.isinf(wanted) or math.isinf(given):  # 1e999: difference and bound are no numbers
        return float(wanted == given)
    return float(abs(given - wanted) <= tolerance * max(1.0, abs(wanted)))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _tolerance(request: RewardRequest) -> float:
    value = request.metadata.get(TOLERANCE_KEY, DEFAULT_TOLERANCE)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise UsageError(
            f"reward 'numeric_match': metadata {TOLERANCE_KEY!r} of sample {request.sample_id} is "
            f"{value!r:.200}, must be a number of at least 0"
        )
    return float(value)


REWARD = BuiltInReward(lambda settings: numeric_match_reward, columns=(TOLERANCE_KEY,), verdict=4)
