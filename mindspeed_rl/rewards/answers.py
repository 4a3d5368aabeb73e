"""Reads answers out of responses: the last number, and a lenient comparison for evaluation."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus after a digit, a letter or a closing bracket is a subtraction, not a sign.
NUMBER = (
    r"(?:(?<![\w.)\]}])-)?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_NUMBER = re.compile(NUMBER)


def extract_last_number(text: str) -> str | None:
    """Return the last number of ``text`` without thousands commas; ``None`` if it has no number.

    ``"3-4"`` gives ``"4"``, ``"x = -4."`` gives ``"-4"``, ``"1,234.50"`` gives ``"1234.50"``.
    """
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def lenient_match(response: str, answer: str) -> bool:
    """Whether the last number of ``response`` equals ``answer``, whatever surrounds it.

    For reports alongside a strict reward: the difference is what the model knows but does not
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
