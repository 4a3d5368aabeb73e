"""Checks of the flags that choose what is recomputed in the backward pass."""

from __future__ import annotations

from mindspeed_rl.config.training import TrainConfig
from mindspeed_rl.core.errors import UsageError

RECOMPUTE_MODULES = ("core_attn", "mlp", "moe")


def check_recompute(train: TrainConfig) -> None:
    """Check the flags of recomputation against each other.

    Raises:
        UsageError: The message names the flag, its value, what is allowed and the fix.
    """
    full = train.recompute_granularity == "full"
    if full and (not train.recompute_method or train.recompute_num_layers is None):
        raise UsageError(
            "--recompute-granularity full needs --recompute-method (uniform or block) and "
            "--recompute-num-layers; add them, e.g. --recompute-method uniform "
            "--recompute-num-layers 1"
        )
    given = [
        name
        for name, value in (
            ("--recompute-method", train.recompute_method),
            ("--recompute-num-layers", train.recompute_num_layers),
        )
        if value
    ]
    if given and not full:
        raise UsageError(
            f"{given[0]} with --recompute-granularity {train.recompute_granularity}: it has a "
            "meaning for full only; add --recompute-granularity full, or remove it"
        )
    unknown = sorted(set(train.recompute_modules) - set(RECOMPUTE_MODULES))
    if unknown:
        raise UsageError(
            f"--recompute-modules {' '.join(unknown)}: allowed are {', '.join(RECOMPUTE_MODULES)}"
        )
