"""Names of the headline metrics, as the curves and the console use them."""

from __future__ import annotations

import math
from collections.abc import Mapping

REWARD = "reward/mean"
EVAL_REWARD = "eval/reward"
ACCURACY = "eval/accuracy"
ACCURACY_LENIENT = "eval/accuracy_lenient"
RESPONSE_LENGTH = "response/length_mean"
MISMATCH_MAX = "mismatch/max_abs_logprob"
MISMATCH_MEAN = "mismatch/mean_abs_logprob"
TOKENS_PER_S = "throughput/tokens_per_s"
STEP_TIME = "time/step_s"
REAL_SHARE = "packing/real_share"

HEADLINE = {
    REWARD: "reward",
    RESPONSE_LENGTH: "length",
    MISMATCH_MAX: "mismatch",
    TOKENS_PER_S: "tokens/s",
    STEP_TIME: "step_s",
}


def is_evaluation(name: str) -> bool:
    """Whether a metric is the result of an evaluation, not of a training step."""
    return name.startswith("eval/")


def of_set(name: str, evaluation_set: str) -> str:
    """Return the name of metric ``eval/x`` for a named evaluation set: ``eval/SET/x``."""
    prefix = f"eval/{evaluation_set}/" if evaluation_set else "eval/"
    return prefix + name.removeprefix("eval/")


def headline(values: Mapping[str, float]) -> dict[str, float]:
    """Select the values for one line on a terminal, under short names, in a fixed order.

    A maximum over nothing, such as the mismatch of a step without a policy update, is left out.
    """
    return {
        short: values[name]
        for name, short in HEADLINE.items()
        if values.get(name, -math.inf) != -math.inf
    }


def format_fields(fields: Mapping[str, float]) -> str:
    """Format ``{"reward": 0.5, "length": 210}`` as ``reward 0.5 | length 210``."""
    return " | ".join(f"{name} {value:.4g}" for name, value in fields.items())
