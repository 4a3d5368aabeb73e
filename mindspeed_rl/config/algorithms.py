"""Flags of advantages, policy losses, the KL term and the correction of the rollout mismatch."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.flag import flag

ADVANTAGE_ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gpg",
    "opo",
    "gae",
)
POLICY_LOSSES = (
    "ppo",
    "gspo",
    "geo_mean",
    "cispo",
    "gpg",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "clip_cov",
    "kl_cov",
)
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
CORRECTION_LEVELS = ("token", "sequence", "geometric")

# Losses whose source averages over sequences; that of the others averages over tokens.
_BY_SEQUENCE = ("gspo", "geo_mean", "sapo")


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """Advantages.

    The advantage of a sample says how much better its reward is than a baseline. grpo: the mean of
    its group, divided by the group's standard deviation; dr_grpo: not divided; rloo: the mean of
    the other samples of the group; gpg: dr_grpo scaled up for groups of equal rewards; opo: the
    mean weighted by length; remax: the reward of the greedy response, which is sampled as well;
    reinforce_plus_plus: the mean and standard deviation of all tokens of the step, of the
    discounted reward; reinforce_plus_plus_baseline: the same of dr_grpo's; gae (PPO): the errors of
    a critic, see --critic-lr, less their mean over all tokens of the step and divided by their
    standard deviation.

    A group of equal rewards has advantages of exactly 0 in all but remax and those that whiten
    (reinforce_plus_plus, reinforce_plus_plus_baseline, gae).
    """

    rl_advantage_estimator: str = flag(
        "grpo", "How rewards become advantages.", choices=ADVANTAGE_ESTIMATORS
    )
    rl_gamma: float = flag(
        1.0,
        "Discount of the reward per token back from the end; reinforce_plus_plus and gae only.",
        minimum=0.0,
        maximum=1.0,
        names=("--rl-gamma", "--gae-gamma"),
    )


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Policy loss.

    r is the probability ratio of the policy to its old self, A the advantage; --grpo-clamp-eps-*
    bound r. ppo: clipped r A. gspo: r of a whole sequence, which needs far smaller bounds (its
    paper: 3e-4 and 4e-4). geo_mean: the geometric mean of r over a sequence, log r bounded. cispo:
    bounded r weights log p, all tokens keep a gradient. gpg: log p A without r. sapo: a sigmoid
    gate instead of a bound. dppo_tv, dppo_kl: the change of the token's probability, or its binary
    KL, is bounded. dro: squared log r as a penalty. clip_cov: ppo without some tokens of high
    covariance of log p and A. kl_cov: r A with a penalty at the tokens of highest covariance.

    The aggregation makes one loss of the tokens of an optimizer step; its denominators are counted
    over all ranks and micro-batches, so a layout never changes the loss. Dr. GRPO:
    --rl-advantage-estimator dr_grpo --rl-loss-aggregation seq-mean-token-sum-norm.
    """

    rl_policy_loss: str = flag("ppo", "Loss of the policy.", choices=POLICY_LOSSES)
    rl_loss_aggregation: str = flag(
        "auto",
        "token-mean: over all tokens; token-sum: not divided; seq-mean-token-sum: token sums over "
        "the number of sequences, -norm: also over --rollout-max-response-length; "
        "seq-mean-token-mean: mean over sequences of the mean over their tokens. auto takes that "
        "of the loss's source: seq-mean-token-mean for gspo, geo_mean, sapo, else token-mean.",
        choices=("auto", *AGGREGATIONS),
    )
    rl_clip_ratio_c: float = flag(
        0.0,
        "Dual clip of ppo and clip_cov: where A is negative the loss is at most this times |A|; "
        "above 1, 0 is off.",
        minimum=0.0,
    )
    rl_dppo_ratio_cap: float = flag(
        20.0, "Largest r that weights a token in dppo_tv and dppo_kl.", minimum=1.0
    )
    rl_sapo_tau_pos: float = flag(1.0, "Steepness of the gate of sapo where A is positive.")
    rl_sapo_tau_neg: float = flag(1.05, "Steepness of the gate of sapo where A is not positive.")
    rl_dro_beta: float = flag(0.05, "Weight of the penalty of dro.", minimum=0.0)
    rl_cov_ratio: float = flag(
        2e-4,
        "Share of the tokens of an optimizer step that clip_cov or kl_cov selects; at least one.",
        minimum=0.0,
        maximum=1.0,
    )
    rl_clip_cov_lower: float = flag(1.0, "Smallest covariance that clip_cov selects.")
    rl_clip_cov_upper: float = flag(5.0, "Largest covariance that clip_cov selects.")
    rl_kl_cov_coef: float = flag(
        1.0, "Weight of |log r| at the tokens that kl_cov selects.", minimum=0.0
    )

    @property
    def aggregation(self) -> str:
        """``--rl-loss-aggregation``, or that of the loss's source."""
        if self.rl_loss_aggregation != "auto":
            return self.rl_loss_aggregation
        return "seq-mean-token-mean" if self.rl_policy_loss in _BY_SEQUENCE else "token-mean"

    @property
    def selects(self) -> bool:
        """Whether tokens are selected over the whole optimizer step."""
        return self.rl_policy_loss in ("clip_cov", "kl_cov")


@dataclass(frozen=True, slots=True)
class KLConfig:
    """Distance to the reference.

    --grpo-kl-beta weighs an estimate of KL(policy || first policy), in the loss or, as PPO has it,
    in the reward. With d = log p - log p of the reference: k1 is d, abs is |d|, k2 is d^2 / 2, k3
    is exp(-d) + d - 1. In the loss the gradient of k1 is 0 on average and that of k3 is biased;
    k2's is right. A trailing + keeps the value and takes the gradient of k2.
    """

    rl_kl_estimator: str = flag("k3", "Estimator of the KL of a token.", choices=KL_ESTIMATORS)
    rl_kl_in_reward: bool = flag(
        False,
        "Subtract the KL of its tokens from the reward of a sample, instead of adding it to the "
        "loss.",
    )
    rl_kl_target: float = flag(
        0.0,
        "KL per token, in nats, that the coefficient is adapted to, starting from --grpo-kl-beta; "
        "0 keeps it constant.",
        minimum=0.0,
    )
    rl_kl_horizon: float = flag(
        10000.0,
        "Samples over which the adapted coefficient may change by a fifth.",
        minimum=1.0,
    )


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """Correction of the rollout mismatch.

    Engine and trainer give a sampled token slightly different probabilities; rho is the trainer's
    over the engine's at the weights that sampled, of a token, of a sequence (product over its
    tokens) or its geometric mean. The policy loss of a token can be weighted by min(rho, bound)
    (truncate) or by rho where it is within both bounds and 0 elsewhere (mask, known as IcePop).
    Independently, what diverges too far can be rejected. A token of weight 0 stays in the
    denominators of the loss. mismatch/* in the metrics says how large rho gets, and is reported
    without any correction as well.

    Example: --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2
    """

    rl_inference_logprobs_is_correction: bool = flag(
        False, "Weight the policy loss by the importance ratio of the trainer to the engine."
    )
    rl_is_correction_mode: str = flag(
        "truncate", "What happens to ratios out of bounds.", choices=("truncate", "mask")
    )
    rl_is_correction_level: str = flag(
        "token", "What the ratio is taken over.", choices=CORRECTION_LEVELS
    )
    rl_importance_sampling_truncation_coef: float = flag(
        2.0, "Upper bound of the ratio.", minimum=0.0
    )
    rl_is_correction_lower: float = flag(
        0.5, "Lower bound of the ratio, of mask only.", minimum=0.0, maximum=1.0
    )
    rl_rejection: str = flag(
        "none",
        "Drop what diverges by this estimator of KL(engine || trainer).",
        choices=("none", "k1", "k2", "k3"),
    )
    rl_rejection_level: str = flag(
        "sequence",
        "token: single tokens; sequence: whole sequences by the sum over their tokens; geometric: "
        "by the mean.",
        choices=CORRECTION_LEVELS,
    )
    rl_rejection_threshold: float = flag(
        0.1, "Largest divergence that is kept, in nats; of k1, its magnitude.", minimum=0.0
    )

    @property
    def active(self) -> bool:
        """Whether anything is corrected."""
        return self.rl_inference_logprobs_is_correction or self.rl_rejection != "none"


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
        4, "Rounds of further prompts for one step, after the first.", minimum=0
    )
    rl_resample_exhausted: str = flag(
        "train-on-partial",
        "When the rounds are used up: train on the groups that there are, with their own "
        "denominators (train-on-partial); fill up with groups of equal rewards (keep-zero-std); "
        "or end the run (stop).",
        choices=("train-on-partial", "keep-zero-std", "stop"),
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
        1.0, "What the reward has lost at --rollout-max-response-length.", minimum=0.0
    )
