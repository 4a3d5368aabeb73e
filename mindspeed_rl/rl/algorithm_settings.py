"""Builds the settings of the algorithms from the flags."""

from __future__ import annotations

from mindspeed_rl.algorithms.advantages import Estimator
from mindspeed_rl.algorithms.correction import CorrectionSettings
from mindspeed_rl.algorithms.losses import LossSettings
from mindspeed_rl.algorithms.selection import CovarianceSettings
from mindspeed_rl.algorithms.value_loss import ValueLossSettings
from mindspeed_rl.config import RLRunConfig


def advantage_estimator(config: RLRunConfig) -> Estimator:
    """Return the estimator that ``--rl-advantage-estimator`` names."""
    return config.advantages.estimator


def loss_settings(config: RLRunConfig, kl_beta: float) -> LossSettings:
    """Return the settings of the policy's loss.

    Args:
        config: Flags of the run.
        kl_beta: Present coefficient of the KL; unused here where the KL is in the reward.
    """
    rl, loss, kl = config.rl, config.policy_loss, config.kl
    return LossSettings(
        policy_loss=loss.rl_policy_loss,
        surrogate=config.surrogate,
        aggregation=loss.aggregation,
        longest=config.rollout.rollout_max_response_length,
        kl_beta=0.0 if kl.rl_kl_in_reward else kl_beta,
        kl_estimator=kl.rl_kl_estimator,
        entropy_weight=rl.grpo_entropy_term_weight,
        correction=correction_settings(config),
    )


def value_loss_settings(config: RLRunConfig) -> ValueLossSettings:
    """Return the settings of the critic's loss, which weighs tokens as the policy's does."""
    return ValueLossSettings(
        clip=config.critic.value_clip,
        aggregation=config.policy_loss.aggregation,
        longest=config.rollout.rollout_max_response_length,
    )


def correction_settings(config: RLRunConfig) -> CorrectionSettings:
    """Return the settings that correct for the mismatch of trainer and engine."""
    flags = config.correction
    weighted = flags.rl_inference_logprobs_is_correction
    return CorrectionSettings(
        mode=flags.rl_is_correction_mode if weighted else "none",
        level=flags.rl_is_correction_level,
        upper=flags.rl_importance_sampling_truncation_coef,
        lower=flags.rl_is_correction_lower,
        rejection=flags.rl_rejection,
        rejection_level=flags.rl_rejection_level,
        rejection_threshold=flags.rl_rejection_threshold,
    )


def covariance_settings(config: RLRunConfig, update: int) -> CovarianceSettings:
    """Return the settings that select tokens by covariance for one optimizer step.

    Args:
        config: Flags of the run.
        update: Number of the optimizer step in the run; part of the seed of the random choice.
    """
    flags = config.surrogate
    return CovarianceSettings(
        ratio=flags.cov_ratio,
        largest=config.policy_loss.loss.selection == "largest",
        lower=flags.clip_cov_lower,
        upper=flags.clip_cov_upper,
        eps_lower=flags.eps_lower,
        eps_upper=flags.eps_upper,
        seed=config.train.seed * 1_000_003 + update,
    )
