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
EPOCH = "data/epoch"
REAL_SHARE = "packing/real_share"

TOKENS_PER_S_PER_DEVICE = "throughput/tokens_per_s_per_device"

HEADLINE = {
    REWARD: "reward",
    RESPONSE_LENGTH: "length",
    "response/truncated_fraction": "cut",
    "loss/policy": "loss",
    "loss/kl": "kl",
    "policy/entropy": "entropy",
    "optimizer/grad_norm": "grad_norm",
    MISMATCH_MAX: "mismatch",
    TOKENS_PER_S_PER_DEVICE: "tokens/s/device",
    STEP_TIME: "step_s",
    EPOCH: "epoch",
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
    """Format ``{"reward": 0.5, "length": 210}`` as ``reward 0.5 | length 210``.

    A reward that no sample has is ``reward -``.
    """
    nothing = {
        name for name, value in fields.items() if name == HEADLINE[REWARD] and math.isnan(value)
    }
    return " | ".join(
        f"{name} {'-' if name in nothing else format_number(value)}"
        for name, value in fields.items()
    )


def format_number(value: float) -> str:
    """Return a number with four digits; large ones, such as tokens per second, as an integer."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


# Names begin with one of these; the headline comes before all of them.
_ORDER = (
    *("eval/", "reward/", "response/", "environment/", "loss/", "policy/", "critic/", "value/"),
    *("optimizer/", "mismatch/", "rollout/", "throughput/", "time/", "time_max/"),
)
_LAST = "memory/"


def in_order(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as people look for them: headline, learning, rollouts, speed, memory last."""
    headlines = list(HEADLINE)

    def place(name: str) -> tuple[int, int]:
        if name in HEADLINE:
            return 0, headlines.index(name)
        group = next((i for i, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))
        return 1, len(_ORDER) + 1 if name.startswith(_LAST) else group

    return {name: values[name] for name in sorted(values, key=place)}
