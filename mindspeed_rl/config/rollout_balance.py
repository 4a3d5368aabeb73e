"""Flags that distribute samples over engines: before a step, during it and across steps."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import Needs, flag

_WITH_REBALANCE = Needs("--rollout-rebalance", ("waiting", "all"))


@dataclass(frozen=True, slots=True)
class RolloutBalanceConfig:
    """Balance of rollouts.

    A step ends with its longest response. Samples are dealt to the engines by the length that
    earlier responses to their prompts had; --rollout-rebalance moves requests from engines that
    are behind to those that are ahead, as tokens: prompt and response so far are read again, and
    sampling goes on with the random stream of the sample. Neither changes what is sampled.
    --partial-rollout-tokens ends a step before its longest responses do: they go on in the next
    step with newer weights, and every token keeps the version of the weights that sampled it.

    Example: --rollout-rebalance all --rollout-rebalance-interval 256
    """

    rollout_balance: str = flag(
        "history",
        "How samples are dealt to engines. history: equal numbers with equal sums of expected "
        "lengths, from earlier responses to the prompt (the first step is dealt evenly); even: "
        "neighbours together, which share the cache of their prompt.",
        choices=("history", "even"),
    )
    rollout_rebalance: str = flag(
        "off",
        "What moves between engines while they generate. off: nothing; waiting: requests that have "
        "not begun; all: also requests that have, where their new prefill costs less than it "
        "gains.",
        choices=("off", "waiting", "all"),
    )
    rollout_rebalance_interval: int = flag(
        128,
        "Steps of an engine between looks at all engines.",
        minimum=1,
        needs=_WITH_REBALANCE,
    )
    rollout_rebalance_gain: float = flag(
        0.05,
        "Least share of the remaining time of two engines that a move must save.",
        minimum=0.001,
        below=1.0,
        needs=_WITH_REBALANCE,
    )
    rollout_ridge_tokens: int = flag(
        256,
        "Tokens that a device computes while it reads the weights once, for the cost model of "
        "--rollout-rebalance: peak FLOPs over memory bandwidth; 16-bit weights.",
        minimum=1,
        needs=_WITH_REBALANCE,
    )
    partial_rollout_tokens: int = flag(
        0,
        "Most tokens that a response grows by in one pass of generation; unfinished ones are "
        "carried over to the next step as soon as enough prompts are complete. 0 is off: every "
        "response ends in its step. Useful with --rl-resample-factor above 1.",
        minimum=0,
    )
