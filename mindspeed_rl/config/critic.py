"""Flags of the critic of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.algorithms.advantages import ESTIMATORS
from mindspeed_rl.core.flag import Needs, flag

_WITH_CRITIC = Needs(
    ESTIMATORS.flag, tuple(name for name, choice in ESTIMATORS.items() if choice.needs_critic)
)


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """Critic.

    With --rl-advantage-estimator gae a second model of its own weights tells the value of every
    token's place: the return that is still to come. The advantage of a token is what came better
    than that. The critic has the training layout of the policy, an optimizer and checkpoints of its
    own, and makes as many optimizer steps; flags of the optimizer that are not here hold for both.

    PPO: --rl-advantage-estimator gae --critic-lr 1e-5 --critic-warmup-steps 10
    """

    critic_hf_checkpoint: str = flag(
        "",
        "First weights of the critic: a causal language model, or a sequence classifier with one "
        "label whose head is taken as well; any other head starts at 0. Empty takes "
        "--hf-checkpoint.",
        needs=_WITH_CRITIC,
    )
    critic_export_hf: str = flag(
        "",
        "Write the critic here at the end of the run, as a sequence classifier with one label; an "
        "earlier export is replaced, anything else is refused.",
        needs=_WITH_CRITIC,
    )
    critic_lr: float = flag(
        1e-5,
        "Peak learning rate of the critic.",
        minimum=0.0,
        needs=_WITH_CRITIC,
    )
    critic_warmup_steps: int = flag(
        0,
        "First steps of the run in which the critic alone is trained.",
        minimum=0,
        names=("--critic-warmup-steps", "--num-critic-only-steps"),
        needs=_WITH_CRITIC,
    )
    value_clip: float = flag(
        0.5,
        "A value may move this far from that at the start of the step and still lower its loss; 0 "
        "is off.",
        minimum=0.0,
        names=("--value-clip", "--cliprange-value"),
        needs=_WITH_CRITIC,
    )
