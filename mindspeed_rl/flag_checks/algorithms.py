"""Checks that the flags of advantages, losses, KL and correction fit each other."""

from __future__ import annotations

from functools import partial

from mindspeed_rl.algorithms.advantages import ESTIMATORS
from mindspeed_rl.algorithms.distillation import TEACHER_FLAG
from mindspeed_rl.algorithms.kl import KL_ESTIMATORS, STRAIGHT_THROUGH
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.rl import PASS_FLAGS
from mindspeed_rl.core.errors import UsageError, check_each, refuse
from mindspeed_rl.flag_checks.needs import check_needs
from mindspeed_rl.flag_checks.partners import check_partner


def check_algorithms(config: RLRunConfig) -> None:
    """Refuse combinations that contradict each other or leave a flag without effect.

    Raises:
        UsageError: The message names the flags, their values, what is allowed and the fix.
    """
    checks = (
        *(check_needs, check_partner, _check_group, _check_kl, _check_groups, _check_carried),
        *(_check_reward_model, _check_teachers, _check_adapters, _check_routing, _check_order),
        *(_check_caps, _check_tail, _check_warmup, _check_correction),
    )
    check_each(*(partial(check, config) for check in checks))


def _check_warmup(config: RLRunConfig) -> None:
    warmup, last = config.critic.critic_warmup_steps, config.train.train_iters
    if warmup and 0 < last <= warmup:  # else when prompts are counted
        raise UsageError(
            f"--critic-warmup-steps {warmup}: the run has --train-iters {last}, so the policy "
            "would never be trained; lower it"
        )


def _check_correction(config: RLRunConfig) -> None:
    if config.correction.active and config.rl.old_logprob == "rollout":
        raise UsageError(
            "--old-logprob rollout puts the engine's log-probs into the ratio, which corrects the "
            "mismatch already; with --rl-inference-logprobs-is-correction or --rl-rejection use "
            "--old-logprob on-policy or recompute"
        )


def _check_teachers(config: RLRunConfig) -> None:
    """Refuse a run that nothing teaches, and a loss that chooses tokens before teachers count."""
    teachers, estimator = config.distillation.teachers, config.advantages.rl_advantage_estimator
    if not teachers and estimator == "none":
        raise UsageError(
            f"--rl-advantage-estimator none: nothing would be learned without {TEACHER_FLAG}; name "
            "a teacher, or choose another estimator"
        )
    loss = config.policy_loss
    if teachers and loss.loss.selects:
        raise UsageError(
            f"--rl-policy-loss {loss.rl_policy_loss}: chooses tokens by the advantages of rewards, "
            f"to which {TEACHER_FLAG} adds later; use ppo"
        )


def _check_adapters(config: RLRunConfig) -> None:
    """Refuse with adapters what copies, keeps apart or records the weights of the policy."""
    if not config.lora.is_on:
        return
    reasons = (
        (
            config.rl.ref_update_interval > 0,
            f"--ref-update-interval {config.rl.ref_update_interval}: the reference is the base, "
            "which never changes",
        ),
        (config.replay.active, "--replay: it compares whole weights"),
    )
    refuse(
        f"--lora-rank {config.lora.lora_rank}: not with {given}; remove one of the two"
        for used, given in reasons
        if used
    )


def _check_routing(config: RLRunConfig) -> None:
    choice, rows = config.rl.rl_routing_replay, config.rl.old_logprob_pass
    if choice != "none" and rows != "packed":
        raise UsageError(
            f"--old-logprob-pass {rows}: not with --rl-routing-replay {choice}, for which the pass "
            "of the old log-probs records the experts of the rows of the update; use "
            "--old-logprob-pass packed"
        )
    if choice == "trainer" and config.rl.old_logprob == "rollout":
        raise UsageError(
            "--rl-routing-replay trainer records the experts in the pass of the old log-probs, "
            "which --old-logprob rollout leaves out; use on-policy or recompute, or "
            "--rl-routing-replay rollout"
        )
    if choice != "rollout":
        return
    factor, carried = config.sampling.rl_resample_factor, config.balance.partial_rollout_tokens
    reasons = (
        (factor > 1, f"--rl-resample-factor {factor:g}"),
        (carried > 0, f"--partial-rollout-tokens {carried}"),
        (config.balance.rollout_rebalance == "all", "--rollout-rebalance all"),
        (bool(config.partner), config.partner),
    )
    refuse(
        f"--rl-routing-replay rollout: not with {given}: the experts of a response are known where "
        "one engine samples all of it for the step it is trained in; remove one of the two, or use "
        "--rl-routing-replay trainer"
        for used, given in reasons
        if used
    )


def _check_group(config: RLRunConfig) -> None:
    size, needed = config.rl.grpo_group_size, config.advantages.estimator.min_group_size
    if size < needed:
        alone = [name for name, choice in ESTIMATORS.items() if choice.min_group_size == 1]
        raise UsageError(
            f"--grpo-group-size {size}: must be at least {needed} with --rl-advantage-estimator "
            f"{config.advantages.rl_advantage_estimator}: a reward is relative to the others of "
            f"its prompt; one sample is enough for {', '.join(alone)}"
        )


def _check_kl(config: RLRunConfig) -> None:
    kl = config.kl
    if kl.rl_kl_in_reward and KL_ESTIMATORS[kl.rl_kl_estimator].in_loss_only:
        raise UsageError(
            f"--rl-kl-estimator {kl.rl_kl_estimator} differs from "
            f"{kl.rl_kl_estimator.removesuffix(STRAIGHT_THROUGH)} in its gradient alone, and a "
            f"reward has none; with --rl-kl-in-reward leave the {STRAIGHT_THROUGH} out"
        )


def _check_reward_model(config: RLRunConfig) -> None:
    """Refuse flags that need rewards during sampling; a reward model scores after it."""
    if not config.rewards.reward_model_hf_checkpoint:
        return
    needed = (
        (
            "--grpo-filter-groups-with-same-reward",
            config.sampling.grpo_filter_groups_with_same_reward,
        ),
        (
            f"--rl-advantage-estimator {config.advantages.rl_advantage_estimator}",
            config.advantages.estimator.needs_greedy,
        ),
    )
    refuse(
        f"{flag} needs rewards while the engine samples, and the reward model of "
        "--reward-model-hf-checkpoint scores afterwards; remove one of the two"
        for flag, given in needed
        if given
    )


def _check_groups(config: RLRunConfig) -> None:
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


def _check_carried(config: RLRunConfig) -> None:
    """Refuse to carry samples into the next step where nothing weighs them."""
    flags, weighted = config.sampling, config.correction.weighted
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


def _check_order(config: RLRunConfig) -> None:
    prompts = config.rl.grpo_prompts_per_step
    if config.balance.prompt_order == "by-length" and prompts == 1:
        raise UsageError(
            "--prompt-order by-length brings prompts of similar length together in a step, and "
            "--grpo-prompts-per-step 1 has one; raise it, or remove the order"
        )


def _check_caps(config: RLRunConfig) -> None:
    """Refuse caps on responses that never cut, never grow, or meet another way to cut."""
    flags, limit = config.balance, config.rollout.rollout_max_response_length
    factor, floor = flags.response_length_cap_factor, flags.response_length_cap_floor
    if not factor:
        return
    if factor <= 1:
        raise UsageError(
            f"--response-length-cap-factor {factor:g}: a response that a cap cuts raises the next "
            "cap by the factor, so that longer ones can be learned; allowed: above 1, or 0 for no "
            "caps"
        )
    if floor >= limit:
        raise UsageError(
            f"--response-length-cap-floor {floor}: with --rollout-max-response-length {limit} no "
            "cap would cut anything; lower it, or remove --response-length-cap-factor"
        )
    carried, partner = flags.partial_rollout_tokens, config.partner
    others = (
        (carried, f"--partial-rollout-tokens {carried}, which continues what was cut"),
        (partner, f"{partner}, whose turns share one limit"),
    )
    refuse(
        f"--response-length-cap-factor {factor:g}: not with {given}; remove one of the two"
        for used, given in others
        if used
    )


def _check_tail(config: RLRunConfig) -> None:
    """Refuse passes in the tail of rollouts where there is no such tail."""
    sampling, balance = config.sampling, config.balance
    reasons = (
        (config.memory.rl_offload == "all", "--rl-offload all: the trainer's models are away then"),
        (
            balance.rollout_rebalance != "off",
            f"--rollout-rebalance {balance.rollout_rebalance}: an engine that is done gets "
            "requests of others",
        ),
        (
            balance.partial_rollout_tokens > 0,
            f"--partial-rollout-tokens {balance.partial_rollout_tokens}: the next step continues "
            "responses, with another policy",
        ),
        (
            sampling.grpo_filter_groups_with_same_reward,
            "--grpo-filter-groups-with-same-reward: most of the work would be for groups that are "
            "not trained on, and a step has several tails",
        ),
        (
            bool(config.agent.rl_agent),
            f"{config.partner}: which turns are a sample is known after the last one",
        ),
    )
    refuse(
        f"{flag} tail: not with {given}; use {flag} single or packed, or remove the other flag"
        for flag in (PASS_FLAGS[name] for name in config.rl.tail_passes)
        for used, given in reasons
        if used
    )
