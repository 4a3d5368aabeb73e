"""Flags of advantages, critic, policy losses, KL and the choice of samples."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.algorithms.advantages import ESTIMATORS, Estimator
from mindspeed_rl.algorithms.aggregation import AGGREGATIONS
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from mindspeed_rl.core.flag import Needs, flag

_WITH_KL = Needs("--grpo-kl-beta")
_WITH_CRITIC = Needs(
    ESTIMATORS.flag, tuple(name for name, choice in ESTIMATORS.items() if choice.needs_critic)
)
_WITH_FILTER = Needs("--grpo-filter-groups-with-same-reward")


def _by_source() -> str:
    """The aggregations that the sources of the losses use, each with its losses."""
    losses: dict[str, list[str]] = {}
    for name, loss in POLICY_LOSSES.items():
        losses.setdefault(loss.aggregation, []).append(name)
    return "; ".join(f"{mode} for {', '.join(names)}" for mode, names in losses.items())


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Advantages.

    The advantage of a sample says how much better its reward r is than a baseline. A group of equal
    rewards has advantages of exactly 0 in all estimators but remax and those that whiten.
    """

    rl_advantage_estimator: str = flag(
        "grpo",
        f"How rewards become advantages. {ESTIMATORS.summary}",
        choices=ESTIMATORS,
    )

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.rl_advantage_estimator]


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
        maximum=1.0,
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


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Policy loss.

    r is the probability ratio of the policy to its old self, A the advantage, sg stops the
    gradient; --grpo-clamp-eps-* bound r.

    The aggregation makes one loss of the tokens of an optimizer step; its denominators are counted
    over all ranks and micro-batches, so a layout never changes the loss. Dr. GRPO:
    --rl-advantage-estimator dr_grpo --rl-loss-aggregation seq-mean-token-sum-norm.
    """

    rl_policy_loss: str = flag(
        "ppo", f"Loss of a token. {POLICY_LOSSES.summary}", choices=POLICY_LOSSES
    )
    rl_loss_aggregation: str = flag(
        "auto",
        f"Weight of a token in the loss. {AGGREGATIONS.summary} auto takes that of the loss's "
        f"source: {_by_source()}.",
        choices=("auto", *AGGREGATIONS),
    )

    @property
    def loss(self) -> PolicyLoss:
        return POLICY_LOSSES[self.rl_policy_loss]

    @property
    def aggregation(self) -> str:
        """``--rl-loss-aggregation``; for ``auto`` the aggregation of the loss's source."""
        given = self.rl_loss_aggregation
        return self.loss.aggregation if given == "auto" else given


@dataclass(frozen=True, slots=True)
class KLConfig:
    """Distance to the reference.

    --grpo-kl-beta weighs an estimate of KL(policy || first policy), in the loss or, as PPO has it,
    in the reward.
    """

    rl_kl_estimator: str = flag(
        "k3",
        f"Estimator of the KL of a token, with d = log p - log p of the reference. "
        f"{KL_ESTIMATORS.summary}",
        choices=KL_ESTIMATORS,
        needs=_WITH_KL,
    )
    rl_kl_in_reward: bool = flag(
        False,
        "Subtract the KL of its tokens from the reward of a sample, instead of adding it to the "
        "loss.",
        needs=_WITH_KL,
    )
    rl_kl_target: float = flag(
        0.0,
        "KL per token, in nats, that the coefficient is adapted to, starting from --grpo-kl-beta; "
        "0 keeps it constant.",
        minimum=0.0,
        needs=_WITH_KL,
    )
    rl_kl_horizon: float = flag(
        10000.0,
        "Samples over which the adapted coefficient may change by a fifth.",
        minimum=1.0,
        needs=Needs("--rl-kl-target"),
    )


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Which samples are trained on.

    A group of equal rewards teaches nothing. With --grpo-filter-groups-with-same-reward (dynamic
    sampling) such groups are left out, and further prompts are sampled in their place, for at most
    --rl-max-resample rounds. What is done when they are used up is --rl-resample-exhausted.

    A response that was cut at the length limit gets a reward that says nothing about its content:
    --rl-overlong-filtering leaves it out of the loss (not out of its group's baseline), and
    --rl-overlong-buffer punishes a response that comes near the limit.

    DAPO: --grpo-filter-groups-with-same-reward --grpo-clamp-eps-upper 0.28
    --rl-overlong-buffer 4096
    """

    grpo_filter_groups_with_same_reward: bool = flag(
        False, "Leave groups of equal rewards out and sample others in their place."
    )
    rl_max_resample: int = flag(
        4,
        "Rounds of further prompts for one step, after the first.",
        minimum=0,
        needs=_WITH_FILTER,
    )
    rl_resample_exhausted: str = flag(
        "train-on-partial",
        "When the rounds are used up: train on the groups that there are, with their own "
        "denominators (train-on-partial); fill up with groups of equal rewards (keep-zero-std); "
        "or end the run (stop).",
        choices=("train-on-partial", "keep-zero-std", "stop"),
        needs=_WITH_FILTER,
    )
    rl_resample_factor: float = flag(
        1.0,
        "Prompts of a round over the groups that are missing. Above 1 the surplus starts the next "
        "step, sampled by older weights: see --old-logprob rollout.",
        minimum=1.0,
    )
    rl_overlong_filtering: bool = flag(
        False, "Leave responses that were cut at the length limit out of the loss."
    )
    rl_overlong_buffer: int = flag(
        0,
        "Tokens before --rollout-max-response-length in which the reward falls linearly; 0 is off.",
        minimum=0,
    )
    rl_overlong_penalty: float = flag(
        1.0,
        "What the reward has lost at --rollout-max-response-length.",
        minimum=0.0,
        needs=Needs("--rl-overlong-buffer"),
    )
