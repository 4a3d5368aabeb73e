"""The format reward, and lenient answer extraction for evaluation."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import partial

from mindspeed_rl.rewards.registry import register_factory
from mindspeed_rl.rewards.settings import RewardSettings
from mindspeed_rl.rewards.types import RewardFunction, RewardRequest

FORMAT_REGEX_KEY = "format_regex"

UNSIGNED_NUMBER = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
# A minus after a digit, a letter or a closing bracket is a subtraction, not a sign.
_NUMBER = re.compile(rf"(?:(?<![\w.)\]}}])-)?{UNSIGNED_NUMBER}")


@register_factory("format")
def make_format_reward(settings: RewardSettings) -> RewardFunction:
    """The function with the pattern of ``--reward-format-regex``.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        re.compile(settings.format_regex)
    except re.error as error:
        raise ValueError(
            f"--reward-format-regex {settings.format_regex!r}: must be a regular expression of "
            f"Python's re ({error})"
        ) from error
    return partial(format_reward, default=settings.format_regex or None)


def format_reward(request: RewardRequest, default: str | None = None) -> float:
    """1.0 when the response ended by itself and has the wanted form, else 0.0.

    It ended by itself when ``finish_reason`` is ``"stop"``. The wanted form is the regular
    expression in the data row's ``format_regex``, or else ``default``: it must match the whole
    response, and ``.`` matches newlines too. Without either every form will do.

    Raises:
        ValueError: ``format_regex`` is not a regular expression.
    """
    if request.finish_reason != "stop":
        return 0.0
    pattern = request.metadata.get(FORMAT_REGEX_KEY, default)
    if pattern is None:
        return 1.0
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"reward 'format': metadata {FORMAT_REGEX_KEY!r} of sample {request.sample_id} is "
            f"{pattern!r:.200}, must be a regular expression of Python's re ({error})"
        ) from error
    return float(compiled.fullmatch(request.response) is not None)


def extract_last_number(text: str) -> str | None:
    """The last number of ``text`` as written, thousands commas removed; ``None`` without one.

    ``"3-4"`` gives ``"4"``, ``"x = -4."`` gives ``"-4"``, ``"1,234.50"`` gives ``"1234.50"``.
    """
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def lenient_match(response: str, answer: str) -> bool:
    """Whether the last number of ``response`` equals ``answer``, whatever surrounds it.

    For reporting next to a strict reward: the difference is what the model knows but does not
    format. Numbers are compared by value (``7.0`` equals ``7``). An answer that is not a decimal
    number, or a digit string with a leading zero (``"0123"``), is compared as text.
    """
    answer = answer.strip()
    found = extract_last_number(response)
    if found is None or not _NUMBER.fullmatch(answer):
        return response.strip() == answer
    wanted = answer.replace(",", "")
    if re.match(r"-?0[0-9]", wanted):
        return found == wanted
    return Decimal(found) == Decimal(wanted)
