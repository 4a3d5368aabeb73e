"""Checks of how advantages, losses, KL and correction go together."""

from __future__ import annotations

import dataclasses
from typing import Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.critic import WITH_CRITIC
from mindspeed_rl.config.flag import flag_names
from mindspeed_rl.core.errors import UsageError

# Without a group there is no baseline.
_WITHOUT_GROUP = ("reinforce_plus_plus", "remax", "gae")
_CLIPPED = ("ppo", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov")

# Flag -> the flag that decides whether it is read, and the values with which it is.
_READ_WITH: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rl_gamma": ("rl_advantage_estimator", ("reinforce_plus_plus", "gae")),
    "critic_hf_checkpoint": ("rl_advantage_estimator", WITH_CRITIC),
    "critic_export_hf": ("rl_advantage_estimator", WITH_CRITIC),
    "critic_lr": ("rl_advantage_estimator", WITH_CRITIC),
    "critic_warmup_steps": ("rl_advantage_estimator", WITH_CRITIC),
    "value_clip": ("rl_advantage_estimator", WITH_CRITIC),
    "gae_lambda": ("rl_advantage_estimator", WITH_CRITIC),
    "grpo_no_std_normalization": ("rl_advantage_estimator", ("grpo",)),
    "grpo_clamp_eps_lower": ("rl_policy_loss", _CLIPPED),
    "grpo_clamp_eps_upper": ("rl_policy_loss", _CLIPPED),
    "rl_clip_ratio_c": ("rl_policy_loss", ("ppo", "clip_cov")),
    "rl_dppo_ratio_cap": ("rl_policy_loss", ("dppo_tv", "dppo_kl")),
    "rl_sapo_tau_pos": ("rl_policy_loss", ("sapo",)),
    "rl_sapo_tau_neg": ("rl_policy_loss", ("sapo",)),
    "rl_dro_beta": ("rl_policy_loss", ("dro",)),
    "rl_cov_ratio": ("rl_policy_loss", ("clip_cov", "kl_cov")),
    "rl_clip_cov_lower": ("rl_policy_loss", ("clip_cov",)),
    "rl_clip_cov_upper": ("rl_policy_loss", ("clip_cov",)),
    "rl_kl_cov_coef": ("rl_policy_loss", ("kl_cov",)),
    "rl_is_correction_mode": ("rl_inference_logprobs_is_correction", (True,)),
    "rl_is_correction_level": ("rl_inference_logprobs_is_correction", (True,)),
    "rl_importance_sampling_truncation_coef": ("rl_inference_logprobs_is_correction", (True,)),
    "rl_is_correction_lower": ("rl_is_correction_mode", ("mask",)),
    "rl_rejection_level": ("rl_rejection", ("k1", "k2", "k3")),
    "rl_rejection_threshold": ("rl_rejection", ("k1", "k2", "k3")),
    "rl_max_resample": ("grpo_filter_groups_with_same_reward", (True,)),
    "rl_resample_exhausted": ("grpo_filter_groups_with_same_reward", (True,)),
}


def check_algorithms(config: RLRunConfig) -> None:
    """Refuse combinations that contradict each other or leave a flag without effect.

    Raises:
        UsageError: naming the flags, their values, what is allowed and the fix.
    """
    _check_group(config)
    _check_read(config)
    _check_bounds(config)
    _check_kl(config)
    _check_sampling(config)
    _check_reward_model(config)
    _check_routing(config)
    if config.rl.ref_update_interval and not config.rl.grpo_kl_beta:
        raise UsageError(
            f"--ref-update-interval {config.rl.ref_update_interval} has no effect with "
            "--grpo-kl-beta 0, which has no reference; give a positive --grpo-kl-beta, or remove it"
        )
    warmup, last = config.critic.critic_warmup_steps, config.train.train_iters
    if warmup and warmup >= last:
        raise UsageError(
            f"--critic-warmup-steps {warmup}: the run has --train-iters {last}, so the policy "
            "would never be trained; lower it"
        )
    if config.correction.active and config.rl.old_logprob == "rollout":
        raise UsageError(
            "--old-logprob rollout puts the engine's log-probs into the ratio, which corrects the "
            "mismatch already; with --rl-inference-logprobs-is-correction or --rl-rejection use "
            "--old-logprob on-policy or recompute"
        )


def _check_routing(config: RLRunConfig) -> None:
    choice = config.rl.rl_routing_replay
    if choice == "trainer" and config.rl.old_logprob == "rollout":
        raise UsageError(
            "--rl-routing-replay trainer records the experts in the pass of the old log-probs, "
            "which --old-logprob rollout leaves out; use on-policy or recompute, or "
            "--rl-routing-replay rollout"
        )
    if choice != "rollout":
        return
    factor, partial = config.sampling.rl_resample_factor, config.balance.partial_rollout_tokens
    for used, given in (
        (factor > 1, f"--rl-resample-factor {factor:g}"),
        (partial > 0, f"--partial-rollout-tokens {partial}"),
        (config.balance.rollout_rebalance == "all", "--rollout-rebalance all"),
        (bool(config.environment.rl_environment), "--rl-environment"),
    ):
        if used:
            raise UsageError(
                f"--rl-routing-replay rollout: not with {given}: the experts of a response are "
                "known where one engine samples all of it for the step it is trained in; remove "
                "one of the two, or use --rl-routing-replay trainer"
            )


def _check_group(config: RLRunConfig) -> None:
    estimator, size = config.advantages.rl_advantage_estimator, config.rl.grpo_group_size
    if size < 1 or (size < 2 and estimator not in _WITHOUT_GROUP):
        raise UsageError(
            f"--grpo-group-size {size}: a relative reward needs at least 2 samples per prompt; "
            "with one every advantage is 0. One is allowed with --rl-advantage-estimator "
            f"{' or '.join(_WITHOUT_GROUP)}"
        )


def _check_read(config: RLRunConfig) -> None:
    """A flag that was changed must be read by what was chosen."""
    sections = [getattr(config, field.name) for field in dataclasses.fields(config)]
    fields = {
        field.name: (field, getattr(section, field.name))
        for section in sections
        if dataclasses.is_dataclass(section)
        for field in dataclasses.fields(section)
    }
    for name, (decider, allowed) in _READ_WITH.items():
        field, value = fields[name]
        chosen_field, chosen = fields[decider]
        if value == field.default or chosen in allowed:
            continue
        typed = flag_names(field)[0] + ("" if value is True else f" {value}")
        switch = flag_names(chosen_field)[0]
        if allowed == (True,):
            raise UsageError(f"{typed} has no effect without {switch}; add it, or remove the flag")
        raise UsageError(
            f"{typed} has no effect with {switch} {chosen}; it is read with "
            f"{', '.join(allowed)}; remove it, or change {switch}"
        )


def _check_bounds(config: RLRunConfig) -> None:
    loss = config.policy_loss
    if 0 < loss.rl_clip_ratio_c <= 1:
        raise UsageError(
            f"--rl-clip-ratio-c {loss.rl_clip_ratio_c:g}: must be above 1, e.g. 3, or 0 to switch "
            "the dual clip off; at 1 every negative advantage would be held back"
        )
    for name, tau in (("pos", loss.rl_sapo_tau_pos), ("neg", loss.rl_sapo_tau_neg)):
        if tau <= 0:
            raise UsageError(f"--rl-sapo-tau-{name} {tau:g}: must be positive")
    if loss.rl_clip_cov_lower >= loss.rl_clip_cov_upper:
        raise UsageError(
            f"--rl-clip-cov-lower {loss.rl_clip_cov_lower:g} is not below --rl-clip-cov-upper "
            f"{loss.rl_clip_cov_upper:g}: no token could be selected"
        )
    coef = config.correction.rl_importance_sampling_truncation_coef
    if coef < 1:
        raise UsageError(
            f"--rl-importance-sampling-truncation-coef {coef:g}: must be at least 1, the ratio of "
            "an engine that equals the trainer"
        )


def _check_kl(config: RLRunConfig) -> None:
    kl, beta = config.kl, config.rl.grpo_kl_beta
    given = [
        text
        for text, is_given in (
            ("--rl-kl-in-reward", kl.rl_kl_in_reward),
            (f"--rl-kl-target {kl.rl_kl_target:g}", kl.rl_kl_target > 0),
            (f"--rl-kl-estimator {kl.rl_kl_estimator}", kl.rl_kl_estimator != "k3"),
        )
        if is_given
    ]
    if given and not beta:
        raise UsageError(
            f"{given[0]} has no effect with --grpo-kl-beta 0, which has no KL term; give a "
            "positive --grpo-kl-beta, or remove the flag"
        )
    if kl.rl_kl_in_reward and kl.rl_kl_estimator.endswith("+"):
        raise UsageError(
            f"--rl-kl-estimator {kl.rl_kl_estimator} differs from "
            f"{kl.rl_kl_estimator.removesuffix('+')} in its gradient alone, and a reward has none; "
            "with --rl-kl-in-reward leave the + out"
        )


def _check_reward_model(config: RLRunConfig) -> None:
    """It scores in the training layout, when sampling is over."""
    model, weight = (
        config.rewards.reward_model_hf_checkpoint,
        config.rewards.reward_model_weight,
    )
    if not model and weight != 1.0:
        raise UsageError(
            f"--reward-model-weight {weight:g} has no effect without --reward-model-hf-checkpoint; "
            "add it, or remove the flag"
        )
    if not model:
        return
    for flag, given in (
        (
            "--grpo-filter-groups-with-same-reward",
            config.sampling.grpo_filter_groups_with_same_reward,
        ),
        (
            "--rl-advantage-estimator remax",
            config.advantages.rl_advantage_estimator == "remax",
        ),
    ):
        if given:
            raise UsageError(
                f"{flag} needs rewards while the engine samples, and the reward model of "
                "--reward-model-hf-checkpoint scores afterwards; remove one of the two"
            )


def _check_sampling(config: RLRunConfig) -> None:
    flags, limit = config.sampling, config.rollout.rollout_max_response_length
    if flags.grpo_filter_groups_with_same_reward and config.rl.grpo_group_size < 2:
        raise UsageError(
            "--grpo-filter-groups-with-same-reward: with --grpo-group-size 1 every group has equal "
            "rewards; raise it to at least 2, or remove the flag"
        )
    if flags.rl_overlong_buffer > limit:
        raise UsageError(
            f"--rl-overlong-buffer {flags.rl_overlong_buffer} is longer than "
            f"--rollout-max-response-length {limit}; lower it"
        )
    if flags.rl_overlong_penalty != 1.0 and not flags.rl_overlong_buffer:
        raise UsageError(
            f"--rl-overlong-penalty {flags.rl_overlong_penalty:g} has no effect without "
            "--rl-overlong-buffer; add it, or remove the flag"
        )
    weighted = config.correction.rl_inference_logprobs_is_correction
    knows_the_sampler = config.rl.old_logprob == "rollout" or (
        config.rl.old_logprob == "recompute" and weighted
    )
    carried = config.balance.partial_rollout_tokens
    if carried and not knows_the_sampler:
        raise UsageError(
            f"--partial-rollout-tokens {carried} carries tokens of older weights into the next "
            f"step, which --old-logprob {config.rl.old_logprob} does not weigh; allowed: "
            "--old-logprob rollout, or recompute with --rl-inference-logprobs-is-correction"
        )
    filtered = flags.grpo_filter_groups_with_same_reward
    if flags.rl_resample_factor > 1 and not (filtered or carried):
        raise UsageError(
            f"--rl-resample-factor {flags.rl_resample_factor:g} has no effect without "
            "--grpo-filter-groups-with-same-reward or --partial-rollout-tokens; add one of them, "
            "or remove the flag"
        )
    if flags.rl_resample_factor > 1 and not knows_the_sampler:
        raise UsageError(
            f"--rl-resample-factor {flags.rl_resample_factor:g} carries samples of older weights "
            f"into the next step, which --old-logprob {config.rl.old_logprob} does not weigh; "
            "allowed: --old-logprob rollout, or recompute with "
            "--rl-inference-logprobs-is-correction"
        )
