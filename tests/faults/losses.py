"""Wrong signs, baselines and bounds in advantages, losses and penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.planting import Fault, gives, takes

_STEP = "tests/unit/rl/test_step.py::"
_ADVANTAGES = "tests/unit/algorithms/test_advantages.py::"
_LOSSES = "tests/unit/algorithms/test_policy_losses.py::"
_KL_AND_ENTROPY = "tests/unit/algorithms/test_losses.py::test_kl_and_entropy_share_the_aggregation"
_VALUE = "tests/unit/algorithms/test_value_loss.py::test_value_and_gradient"
_ALGORITHMS = "tests/unit/rl/test_algorithms.py::"
_SOURCE = _LOSSES + "test_value_and_gradient_are_those_of_the_source"


def _negated(value: Any) -> Any:
    return -value


def _advantages_negated(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, name: str, values: Any) -> Any:
        turned = name == "advantages" and values is not None
        return original(self, name, -values if turned else values)

    return changed


def _local(values: Any) -> Any:
    return values


def _turned(groups: Any) -> Any:
    """The rewards that turn the sign of remax; others as they are."""
    if groups.greedy is None:
        return groups
    return replace(groups, rewards=-groups.rewards, greedy=-groups.greedy)


def _larger_side(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(ratio: Any, advantages: Any, settings: Any) -> Any:
        found = original(ratio, -advantages, settings)
        return replace(found, loss=-found.loss)

    return changed


def _bounds_swapped(settings: Any) -> Any:
    return replace(settings, eps_lower=settings.eps_upper, eps_upper=settings.eps_lower)


def _turned_kl(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(logprobs: Any, reference: Any, estimator: str) -> Any:
        return original(2 * reference - logprobs, reference, estimator)

    return changed


LOSSES = (
    Fault("advantage-negated", "mindspeed_rl.samples.packing:MicroBatch.with_column",
          _advantages_negated, _STEP + "test_gradient_of_one_step_in_closed_form",
          "The policy would learn what is punished."),
    Fault("advantages-over-the-batch-not-the-group",
          "mindspeed_rl.rl.advantages:group_rewards",
          gives(lambda g: replace(g, rewards=g.rewards.view(1, -1), lengths=g.lengths.view(1, -1))),
          _STEP + "test_advantages_are_relative_to_the_own_group",
          "Answers to hard questions would be punished for the question."),
    Fault("rewards-that-abstained-have-a-baseline",
          "mindspeed_rl.algorithms.advantages:_statistics",
          takes(rewards=lambda rewards: rewards.nan_to_num()),
          _ADVANTAGES + "test_relative_advantages_are_those_of_the_source",
          "A reward without an opinion would count as a wrong answer."),
    Fault("remax-with-the-sign-turned", "mindspeed_rl.rl.advantages:group_rewards",
          gives(_turned), _ALGORITHMS + "test_every_estimator_reaches_its_tokens",
          "The policy would learn to be worse than its greedy answer."),
    Fault("gae-looks-into-the-next-sequence",
          "mindspeed_rl.algorithms.token_advantages:generalized_advantages",
          takes(lengths=lambda lengths: [sum(lengths)]),
          _ADVANTAGES + "test_generalized_advantages",
          "Rewards of one sample would reach the sample packed before it."),
    Fault("whitening-per-rank", "mindspeed_rl.algorithms.token_advantages:whitened",
          takes(reduce=lambda _: _local),
          _ADVANTAGES + "test_whitening_is_over_all_counted_tokens_of_all_ranks",
          "Advantages would depend on the number of ranks."),
    Fault("clip-bounds-swapped-in-the-loss", "mindspeed_rl.algorithms.policy_losses:_clipped",
          takes(s=_bounds_swapped), _SOURCE,
          "Clip-higher would become clip-lower."),
    Fault("clip-takes-the-larger-side", "mindspeed_rl.algorithms.policy_losses:_clipped",
          _larger_side, _SOURCE,
          "The loss would hold back the wrong tokens."),
    Fault("k3-by-the-difference-of-exponentials", "mindspeed_rl.algorithms.kl:k3",
          lambda original: lambda difference: (-difference).exp() + difference - 1.0,
          "tests/unit/algorithms/test_kl.py::test_k3_is_exact_and_never_negative_near_0",
          "A small KL would be rounding errors of either sign."),
    Fault("kl-with-the-sign-turned", "mindspeed_rl.algorithms.kl:kl_estimate",
          _turned_kl, "tests/unit/algorithms/test_kl.py::test_value_and_gradient",
          "The policy would be pushed away from its reference."),
    Fault("entropy-bonus-is-a-penalty", "mindspeed_rl.algorithms.losses:policy_loss",
          takes(settings=lambda s: replace(s, entropy_weight=-s.entropy_weight)), _KL_AND_ENTROPY,
          "Exploration would end sooner, not later."),
    Fault("importance-ratio-turned", "mindspeed_rl.algorithms.losses:correct",
          lambda original: lambda trainer, engine, *rest: original(engine, trainer, *rest),
          _ALGORITHMS + "test_importance_weights_compare_the_engine_with_the_weights_that_sampled",
          "The correction would double the mismatch that it corrects."),
    Fault("kl-added-to-the-reward", "mindspeed_rl.rl.advantages:_Tokens.sums_of_samples",
          gives(_negated),
          _ALGORITHMS + "test_the_kl_of_its_tokens_is_taken_from_the_reward_of_a_sample",
          "Samples would be rewarded for leaving the reference."),
    Fault("long-responses-rewarded", "mindspeed_rl.rl.advantages:length_penalty",
          gives(_negated),
          "tests/unit/rl/test_dynamic_sampling.py::"
          "test_long_responses_are_punished_before_the_baseline",
          "Responses would grow to the limit."),
    Fault("gain-of-a-teacher-with-the-sign-turned",
          "mindspeed_rl.algorithms.losses:teacher_gain", gives(_negated),
          "tests/unit/algorithms/test_losses.py::test_a_teacher_adds_to_the_advantages",
          "The policy would learn to be unlike its teacher."),
    Fault("every-teacher-speaks-of-every-sample", "mindspeed_rl.distillation.teachers:_has",
          gives(lambda mine: mine | True),
          "tests/unit/distillation/test_teachers.py::"
          "test_every_token_has_the_log_prob_of_its_own_teacher",
          "The teacher of code would correct the answers in mathematics."),
    Fault("full-kl-without-its-mean", "mindspeed_rl.distillation.full_kl:_combined",
          gives(lambda stats: stats * stats.new_tensor([1, 1, 0, 1, 1])[:, None]),
          "tests/unit/distillation/test_full_kl.py::"
          "test_value_and_gradients_are_those_of_the_definition",
          "The loss would be the difference of two normalisations."),
    Fault("value-loss-not-bounded", "mindspeed_rl.algorithms.value_loss:value_loss",
          takes(clip=lambda _: 0.0), _VALUE,
          "--value-clip would do nothing."),
)  # fmt: skip
