"""1 when the final answer is mathematically equal to the reference (math-verify)."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards.types import BuiltInReward, RewardRequest

_HAS_MATH_DELIMITERS = re.compile(r"\\boxed|\\\(|\\\[|\$.+\$", re.DOTALL)


def _is_not_timeout_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")


@functools.cache
def _math_verify() -> Any:
    # Imported at first use, since the import (mostly sympy) is slow.
    import math_verify

    # It warns once per process that its time limits are off; `RewardPool` enforces limits instead.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).addFilter(_is_not_timeout_notice)
    return math_verify


def _warm_up() -> None:
    """Score an example, so that math-verify does its slow imports."""
    math_reward(RewardRequest(0, "", r"\boxed{\frac{1}{2}} or 0.5", "1/2", "stop", 1))


def math_reward(request: RewardRequest) -> float:
    r"""Return 1.0 when the final answer is mathematically equal to the reference, else 0.0.

    Extraction and comparison are math-verify's: ``\boxed{...}`` first, then other LaTeX, then the
    last number of the text; ``1/2`` equals ``0.5``. The reference is the bare answer (``42``,
    ``\frac{1}{2}``, ``x^2 + 1``) or contains its own ``$...$`` or ``\boxed{...}``.

    math-verify's own time limits are off: they rest on SIGALRM, which fails outside of a main
    thread and does not interrupt C code. `RewardPool` kills instead.

    Raises:
        UsageError: the reference answer holds nothing math-verify can read.
    """
    library = _math_verify()
    answer = request.answer.strip()
    if not _HAS_MATH_DELIMITERS.search(answer):
        # Without delimiters only numbers are extracted: `2x+1` would be read as 2.
        answer = rf"\boxed{{{answer}}}"
    reference = library.parse(answer, parsing_timeout=None, raise_on_error=True)
    if not reference:
        raise UsageError(
            f"reward 'math': cannot read the reference answer {request.answer!r:.200} of sample "
            f"{request.sample_id}; give a number or a LaTeX expression, or use 'exact_match'"
        )
    candidate = library.parse(request.response, parsing_timeout=None)
    return float(library.verify(reference, candidate, timeout_seconds=None))


REWARD = BuiltInReward(lambda settings: math_reward, verdict=1, warm_up=_warm_up)
