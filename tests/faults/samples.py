"""Wrong or lost samples, masks and denominators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from faults.planting import Fault, gives, gives_fields, skipped, takes, then

_ROW = "tests/unit/samples/test_packing.py::test_a_packed_row_by_definition"
_STEP = "tests/unit/rl/test_step.py::"
_TABLE = "tests/unit/samples/test_sample_table.py::"
_SAMPLING = "tests/unit/rl/test_dynamic_sampling.py::"
_PARTIAL = "tests/unit/rl/test_partial_rollout.py::"
_SINGLE = "tests/unit/rl/test_single_rows.py::"
_TALK = "tests/unit/environments/test_environments.py::"
_LOSSES = "tests/unit/algorithms/test_policy_losses.py::"
_POOL = "tests/unit/rewards/test_pool.py::"


def _without_masks(rollouts: Sequence[Any]) -> list[Any]:
    return [replace(r, completion=replace(r.completion, loss_mask=None)) for r in rollouts]


def _zero_where_it_failed(result: Any) -> Any:
    return replace(result, reward=0.0, status="ok") if result.status == "error" else result


def _nan_accepted(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda label, value: value if value != value else original(label, value)


def _rewards_in_order_of_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any) -> Any:
        self._rollouts.sort(key=lambda rollout: rollout.sample_id)
        return original(self)

    return changed


def _all_fresh(batches: Any) -> Any:
    marks = [m.column("on_policy_mask") for m in batches.micro_batches]
    return batches.with_column("on_policy_mask", [m | True for m in marks])


def _own_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Divides by the tokens and sequences of the micro-batch."""

    def changed(mode: str, sequences: Any, denominators: Any, longest: int) -> Any:
        count = sequences.of_token.numel()
        own = replace(denominators, tokens=count, sequences=sequences.of_token.unique().numel())
        return original(mode, sequences, own, longest)

    return changed


def _local(values: Any) -> Any:
    return values


def _of_the_other_model(early: Mapping[int, Any]) -> dict[int, Any]:
    return {i: replace(e, old=e.reference, reference=e.old) for i, e in early.items()}


SAMPLES = (
    Fault("targets-not-shifted", "mindspeed_rl.samples.packing:pack",
          gives_fields(targets=lambda micro: micro.token_ids), _ROW,
          "The model would learn to repeat the token it has just read."),
    Fault("loss-mask-off-by-one", "mindspeed_rl.samples.packing:pack",
          gives_fields(
              loss_mask=lambda micro: micro.loss_mask.roll(1),
              trained=lambda micro: micro.trained + 1,
          ), _ROW,
          "The first token of a response would not be trained on."),
    Fault("tokens-of-the-environment-trained", "mindspeed_rl.samples.store:keep_rollouts",
          takes(rollouts=_without_masks),
          _TALK + "test_turns_follow_each_other_and_only_the_models_tokens_are_trained",
          "The policy would learn to write the answers of its tools."),
    Fault("denominators-count-tokens-of-the-environment",
          "mindspeed_rl.samples.store:SampleStore.num_trained",
          lambda original: lambda self, sample: sample.num_tokens,
          _TALK + "test_gradient_and_denominators_leave_the_environment_out",
          "Gradients of conversations would shrink with what the tools say."),
    Fault("cut-responses-are-trained-on-all-the-same",
          "mindspeed_rl.samples.store:as_train_samples",
          takes(drop_truncated=lambda _: False),
          _SAMPLING + "test_truncated_responses_are_left_out_of_the_loss_alone",
          "--rl-overlong-filtering would do nothing but change the denominators."),
    Fault("denominators-count-sequences-without-a-token",
          "mindspeed_rl.algorithms.types:Denominators.of",
          lambda original: (lambda cls, counts: (lambda known: replace(original(cls, known),
          sequences=len(known)))(tuple(counts))),
          _LOSSES + "test_value_and_gradient_are_those_of_the_source",
          "Sequence means would shrink with the responses that were filtered out."),
    Fault("denominators-of-each-micro-batch", "mindspeed_rl.algorithms.aggregation:token_weights",
          _own_tokens, _LOSSES + "test_micro_batches_add_up_to_the_batch",
          "Gradients would depend on how samples are cut into micro-batches."),
    Fault("means-of-sequences-over-one-rank", "mindspeed_rl.algorithms.types:Sequences.sums",
          lambda original: lambda self, values: original(replace(self, reduce=_local), values),
          _LOSSES + "test_context_parallel_ranks_add_up_to_the_batch",
          "Sequence losses would take the part of one rank for the whole sequence."),
    Fault("rows-on-other-ranks-than-planned",
          "mindspeed_rl.packing.micro_batches:RowPlace.has",
          takes(cp_rank=lambda rank: (rank + 1) % 4),
          "tests/unit/samples/test_hybrid_rows.py::"
          "test_ranks_of_a_row_have_it_and_every_token_is_on_one_of_them",
          "Ranks would exchange keys and values of different rows."),
    Fault("sums-over-rows-of-other-ranks",
          "mindspeed_rl.trainer.train_engine:context_process_group",
          lambda original: lambda size: original(4),
          "tests/distributed/test_hybrid_context.py::"
          "test_sums_over_a_row_are_over_the_ranks_that_share_it",
          "Sequence losses and values of a short row would take in those of other rows."),
    Fault("shown-tokens-of-the-next-place",
          "mindspeed_rl.samples.shown_tokens:ShownTokens.gather",
          gives(lambda found: {k: {p + 1: v for p, v in t.items()} for k, t in found.items()}),
          "tests/unit/rl/test_shown_tokens.py::"
          "test_tokens_of_shown_samples_have_their_own_values[-on-policy]",
          "People would see the mismatch of a token beside its neighbour."),
    Fault("shown-tokens-of-other-samples",
          "mindspeed_rl.samples.shown_tokens:ShownTokens.follow",
          takes(samples=lambda samples: [
              replace(s, sample_id=(s.sample_id + 1) % len(samples)) for s in samples
          ]),
          "tests/unit/rl/test_shown_tokens.py::"
          "test_tokens_of_shown_samples_have_their_own_values[-on-policy]",
          "People would see the advantage of another response."),
    Fault("lost-samples-go-unnoticed", "mindspeed_rl.samples.rollout_info:_check_table",
          skipped, _TABLE + "test_a_sample_that_is_lost_or_doubled_stops_the_step",
          "A missing sample would be trained on as an empty one of prompt 0."),
    Fault("ranks-of-an-engine-compare-tokens-alone", "mindspeed_rl.samples.rollout_info:_checksum",
          takes(columns=lambda columns: columns[:1]),
          _TABLE + "test_ranks_of_an_engine_that_differ_stop_the_step[mask]",
          "Tensor-parallel ranks would train on different masks, log-probs or experts."),
    Fault("samples-of-other-weights-count-as-on-policy",
          "mindspeed_rl.rl.logprobs:check_on_policy",
          skipped, _STEP + "test_on_policy_samples_must_come_from_the_present_weights",
          "Their ratio would silently be 1."),
    Fault("siblings-grouped-across-prompts", "mindspeed_rl.rl.rollouts:_StepSampling.one_pass",
          takes(prompts=lambda prompts: [p for k in range(3) for p in prompts[k::3]]),
          _STEP + "test_collect_gives_every_sample_with_its_prompt_and_reward",
          "Advantages would compare answers to different questions."),
    Fault("rewards-of-other-samples", "mindspeed_rl.generation.scoring:Scorer.finish",
          _rewards_in_order_of_ids,
          _STEP + "test_collect_gives_every_sample_with_its_prompt_and_reward",
          "Samples are scored in the order in which they end."),
    Fault("raising-reward-counts-as-0", "mindspeed_rl.rewards.scoring:score_sample",
          gives(_zero_where_it_failed),
          _POOL + "test_raising_reward_is_counted_and_above_the_limit_raises",
          "A bug in a reward function would teach that all answers are wrong."),
    Fault("samples-to-come-are-not-counted",
          "mindspeed_rl.rewards.pool:RewardPool.check_error_rate", takes(to_come=lambda _: 0),
          "tests/unit/rewards/test_faults.py::"
          "test_samples_to_come_may_still_bring_a_share_down",
          "A few slow samples that are scored first would end a run."),
    Fault("rows-of-the-reference-in-another-order",
          "mindspeed_rl.rl.single_rows:_of_micro_batch",
          takes(computed=lambda computed: dict(zip(computed, reversed([*computed.values()]),
                                                   strict=True))),
          _SINGLE + "test_every_sample_has_a_row_of_its_own",
          "The KL would compare tokens of one response with log-probs of another."),
    Fault("early-log-probs-are-dropped", "mindspeed_rl.generation.rollout_worker:with_early",
          takes(early=lambda early: {}),
          _SINGLE + "test_what_came_during_the_rollout_is_not_computed_again",
          "The work of the tail would be done twice, and nothing would say so."),
    Fault("early-log-probs-of-the-other-model",
          "mindspeed_rl.rl.single_rows:TailPasses._logprobs", gives(_of_the_other_model),
          _SINGLE + "test_the_tail_ends_between_two_bundles_when_all_engines_are_done",
          "The ratio would be to the reference, and the KL to the policy itself."),
    Fault("column-of-the-other-early-pass", "mindspeed_rl.rl.single_rows:single_row_logprobs",
          takes(name=lambda name: {"old": "reference", "reference": "old"}[name]),
          _SINGLE + "test_what_came_during_the_rollout_is_not_computed_again",
          "Old log-probs and those of the reference would change places for early samples."),
    Fault("nan-reward-accepted", "mindspeed_rl.rewards.scoring:check_reward",
          _nan_accepted, "tests/unit/rewards/test_functions.py::test_refused_values",
          "One NaN spreads over its whole group."),
    Fault("surplus-groups-dropped", "mindspeed_rl.rl.rollouts:fill_step",
          gives_fields(carried=lambda _: []),
          _SAMPLING + "test_a_resumed_run_keeps_the_surplus_that_it_has_a_share_in",
          "Groups that were generated and accepted would never be trained on."),
    Fault("open-responses-forgotten", "mindspeed_rl.rl.rollouts:complete_groups",
          gives_fields(partial=lambda _: []),
          _PARTIAL + "test_every_group_is_trained_on_once_and_whole",
          "Long responses would never be finished, and the policy becomes short."),
    Fault("one-version-for-all-tokens", "mindspeed_rl.samples.rollout_info:RolloutInfo.grown_from",
          lambda original: lambda self, before: self,
          _PARTIAL + "test_every_token_knows_the_weights_that_sampled_it",
          "Tokens of older weights would be taken for on-policy ones."),
    Fault("older-tokens-taken-for-fresh", "mindspeed_rl.rl.logprobs:with_on_policy_mask",
          gives(_all_fresh), _PARTIAL + "test_the_ratio_is_to_the_weights_that_sampled",
          "Learning would be reported as a mismatch of engine and trainer."),
    Fault("sampler-repeats-after-a-resume",
          "mindspeed_rl.data.sampler:PromptSampler.load_state_dict",
          then(lambda self, *_, **__: setattr(self, "_position", max(0, self._position - 1))),
          "tests/unit/data/test_sampler.py::test_resume_anywhere_equals_uninterrupted",
          "A prompt would be trained on twice in an epoch."),
    Fault("order-by-length-of-a-resume", "mindspeed_rl.data.sampler:PromptSampler.state_dict",
          gives(lambda state: {k: v for k, v in state.items() if k != "by_length"}),
          "tests/unit/data/test_sampler.py::test_a_resume_has_the_order_of_the_uninterrupted_run",
          "A resumed epoch would draw some prompts twice and others never."),
    Fault("skipped-updates-count-as-work", "mindspeed_rl.rl.throughput:passes",
          takes(skipped=lambda _: 0.0),
          "tests/unit/rl/test_throughput.py::test_each_part_has_its_own_tokens_and_seconds",
          "Utilisation would be that of work which nobody did."),
    Fault("what-a-model-read-makes-its-responses-long",
          "mindspeed_rl.samples.sample_metrics:sample_metrics",
          takes(samples=lambda found: [replace(s, num_sampled=s.num_tokens) for s in found]),
          _STEP + "test_lengths_count_what_the_model_sampled",
          "An agent that is told more would look like a model that says more."),
    Fault("a-die-counts-as-a-card", "mindspeed_rl.metrics.throughput:token_rates",
          takes(devices=lambda devices: replace(devices, per_card=1)),
          "tests/unit/metrics/test_throughput.py::"
          "test_a_card_of_two_dies_has_twice_the_rate_of_a_die",
          "Rates per card would be half of published ones for the same run."),
)  # fmt: skip
