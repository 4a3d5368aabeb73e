"""Faults in what joins the parts: building, training, resuming, evaluating, schedules, settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from faults.planting import Fault, gives, returns, skipped, takes, then

_BUILDING = "tests/unit/rl/test_building.py::"
_LOOP = "tests/unit/rl/test_train_loop.py::"
_RESUME = "tests/unit/rl/test_resume.py::"
_PEERS = "tests/distributed/test_peer_copies.py::"
_STATE = "tests/distributed/test_resume_state.py::"
_OPTIMIZER = "tests/unit/trainer/test_optimizer_schedule.py::"
_SETTINGS = "tests/unit/rl/test_algorithm_settings.py::"
_REPORT = "tests/unit/rl/test_report.py::"
_ALGORITHMS = "tests/unit/rl/test_algorithms.py::"
_PPO = "tests/unit/rl/test_ppo_step.py::"
_PLANNING = "tests/unit/planning/"

_CONTINUES = _RESUME + "test_a_resumed_run_has_the_state_of_the_uninterrupted_one"


def _built_with(role: str, **arguments: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Another argument (made of the job and what was given) where a role is built."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(
            job: Any, which: str, num_updates: int, temperature: float = 1.0, **rest: Any
        ) -> Any:
            given = {"num_updates": num_updates, "temperature": temperature}
            if which == role:
                given |= {name: edit(job, given[name]) for name, edit in arguments.items()}
            return original(job, which, given["num_updates"], given["temperature"], **rest)

        return changed

    return change


def _at_one(job: Any, temperature: float) -> float:
    return 1.0


def _in_steps(job: Any, num_updates: int) -> int:
    return num_updates // int(job.plan.batch.updates)


def _at_earlier_prompts(result: Any) -> Any:
    """The state after a rollback, with the sampler four prompts earlier in its epoch."""
    sampler = result[0].sampler
    place = sampler.state_dict()
    sampler.load_state_dict({**place, "position": place["position"] - 4})
    return result


def _when_resumed(effect: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """An effect on the run and its state after it was resumed."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(run: Any) -> Any:
            state, report = original(run)
            if report.start:
                effect(run, state)
            return state, report

        return changed

    return change


def _skips_a_batch(run: Any, state: Any) -> None:
    state.sampler.next(run.plan.batch.prompts)


def _at_step(edit: Callable[[int], int]) -> Callable[..., Any]:
    """The state says another step while the function runs."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(run: Any, state: Any, *rest: Any) -> Any:
            step = state.step
            state.step = edit(step)
            try:
                return original(run, state, *rest)
            finally:
                state.step = step

        return changed

    return change


def _kl_beta_of_the_flags(run: Any, state: Any) -> None:
    state.kl_beta = run.config.rl.grpo_kl_beta


def _version_0(run: Any, state: Any) -> None:
    state.version = 0


def _forgets_context(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, values: values if self.layout.parallel.dp == 1 else original(self, values)


def _with_setting(**changes: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Another keyword argument, made of all."""
    return lambda original: (
        lambda **given: original(**given | {name: edit(given) for name, edit in changes.items()})
    )


def _engines_logprobs(micro: Any) -> Any:
    return micro.with_column("old_logprobs", micro.column("rollout_logprobs"))


def _swapped_bounds(settings: Any) -> Any:
    s = settings.surrogate
    return replace(settings, surrogate=replace(s, eps_lower=s.eps_upper, eps_upper=s.eps_lower))


def _as_in_training(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, request: Any, phase: Any, compare: Any = None, **others: Any) -> Any:
        request = replace(request, attempt=0) if compare else request  # evaluations alone compare
        return original(self, request, phase, compare, **others)

    return changed


def _blames_the_neighbour(results: list[Any]) -> list[Any]:
    """Status and reward of a failed sample at the next one, and the other way round."""
    found = list(results)
    for i, result in enumerate(results):
        if result.status == "error":
            other = (i + 1) % len(results)
            found[i] = replace(results[other], sample_id=results[i].sample_id)
            found[other] = replace(results[i], sample_id=results[other].sample_id)
    return found


WIRING = (
    # --- building the run
    Fault("policy-at-temperature-1", "mindspeed_rl.building.models:build_engine",
          _built_with("policy", temperature=_at_one),
          _BUILDING + "test_policy_and_reference_are_of_the_temperature_of_the_rollouts",
          "Ratios would compare another distribution than the one that sampled."),
    Fault("reference-at-temperature-1", "mindspeed_rl.building.models:new_engine",
          lambda original: (lambda job, role, *rest, **how: original(job, role, *rest,
          **how | ({"temperature": 1.0} if role == "reference" else {}))),
          _BUILDING + "test_policy_and_reference_are_of_the_temperature_of_the_rollouts",
          "The KL would be to another distribution, and nothing else notices."),
    Fault("reference-without-the-weights-of-the-policy",
          "mindspeed_rl.rl.components:Models.refresh_reference", skipped,
          _BUILDING + "test_the_reference_has_the_weights_that_were_read_for_the_policy",
          "The KL would be to weights that nobody set."),
    Fault("reference-copied-after-the-checkpoint-was-loaded", "mindspeed_rl.rl.resume:start",
          _when_resumed(lambda run, _: run.models.refresh_reference()), _CONTINUES,
          "Each restart would allow the policy to move as far again."),
    Fault("horizon-in-steps-not-updates", "mindspeed_rl.building.models:build_engine",
          _built_with("policy", num_updates=_in_steps),
          _BUILDING + "test_schedules_end_with_the_updates_of_the_run",
          "With k updates a step the rate reaches --min-lr after 1/k of the run."),
    Fault("critic-with-the-learning-rate-of-the-policy",
          "mindspeed_rl.building.models:new_engine",
          lambda original: (lambda job, role, layout, train, num_updates, **rest: original(job,
          role, layout, job.config.train, num_updates, **rest)),
          _BUILDING + "test_the_critic_has_a_learning_rate_of_its_own",
          "--critic-lr would do nothing."),
    Fault("prompts-in-the-same-order-for-every-seed",
          "mindspeed_rl.rl.components:PromptSampler",
          takes(seed=lambda _: 0), _BUILDING + "test_the_seed_decides_the_order_of_the_prompts",
          "Three seeds would be less than three experiments."),
    # --- the loop and the step
    Fault("critic-warm-up-one-step-short", "mindspeed_rl.rl.update:update",
          _at_step(lambda step: step + 1),
          _LOOP + "test_the_critic_alone_is_trained_in_the_warm_up",
          "The policy would move by a critic that was promised more time."),
    Fault("critic-trains-the-policy-along", "mindspeed_rl.rl.update:update",
          _at_step(lambda _: 1 << 30), _PPO + "test_a_critic_alone",
          "--critic-warmup-steps would do nothing."),
    Fault("evaluated-a-step-early", "mindspeed_rl.rl.report:RunReporter.evaluate_if_due",
          takes(step=lambda step: step + 1),
          _LOOP + "test_an_evaluation_is_of_the_weights_after_its_step",
          "Curves of accuracy would belong to other weights."),
    Fault("reference-refreshed-a-step-late", "mindspeed_rl.rl.update:refresh_reference",
          takes(step=lambda step: step - 1),
          "tests/unit/rl/test_other_models.py::test_the_policy_becomes_the_reference",
          "The KL would be to other weights than the flag says."),
    Fault("scores-of-other-samples", "mindspeed_rl.rl.reward_model:last_token_values",
          gives(lambda scores: scores[::-1]),
          "tests/unit/rl/test_other_models.py::test_the_score_of_the_last_token_is_added",
          "The reward model would praise other answers."),
    Fault("kl-in-reward-of-the-engines-logprobs", "mindspeed_rl.rl.advantages:_kl",
          takes(micro=_engines_logprobs),
          _ALGORITHMS + "test_the_kl_in_the_reward_is_of_the_trainers_logprobs",
          "The mismatch of engine and trainer would be punished as KL."),
    Fault("wrong-tail-in-the-p99",
          "mindspeed_rl.algorithms.histogram:MagnitudeHistogram.upper_quantiles",
          takes(shares=lambda shares: [5 * share for share in shares]),
          "tests/unit/rl/test_step.py::test_the_quantiles_of_the_mismatch_are_of_all_tokens",
          "The alarm for a drifting engine would be four times as deaf."),
    Fault("mismatch-quantiles-of-one-rank",
          "mindspeed_rl.algorithms.histogram:MagnitudeHistogram.upper_quantiles",
          takes(reduce=lambda _: lambda counts: counts),
          "tests/unit/algorithms/test_histogram.py::test_log_uniform_values_of_all_ranks",
          "Each rank would see the tail of its own tokens, and the largest of those be reported."),
    Fault("mismatch-counts-of-the-last-micro-batch",
          "mindspeed_rl.algorithms.histogram:MagnitudeHistogram.add",
          lambda original: (lambda self, *values: (self.counts.zero_(), original(self, *values))),
          "tests/unit/rl/test_step.py::test_the_quantiles_of_the_mismatch_are_of_all_tokens",
          "The quantiles would be of a few of the tokens."),
    Fault("a-mismatch-that-is-no-number-passes",
          "mindspeed_rl.metrics.agreement:check_mismatch",
          takes(mismatch=lambda mismatch: mismatch if mismatch == mismatch else 0.0),
          _REPORT + "test_a_step_with_a_wrong_mismatch_is_logged_and_ends_the_run",
          "A run would train on numbers that are none."),
    Fault("an-update-by-numbers-that-are-none", "mindspeed_rl.core.alarms:GradientWatch.see",
          takes(norm=lambda norm: norm if norm == norm else 1.0),
          "tests/unit/rl/test_run_alarms.py::"
          "test_an_update_by_numbers_that_are_none_ends_the_run",
          "All weights would be NaN after one update."),
    Fault("a-rollback-that-draws-the-same-prompts", "mindspeed_rl.replay.rollback:roll_back",
          gives(_at_earlier_prompts),
          "tests/unit/rl/test_rollback.py::"
          "test_a_run_goes_back_and_passes_over_the_prompts_since_then",
          "The prompts that broke the run would come again."),
    Fault("fp32-with-the-bounds-of-bf16", "mindspeed_rl.core.agreement:agreement_bounds",
          takes(bf16=lambda _: True),
          "tests/unit/rl/test_step.py::test_an_engine_that_computes_with_stale_tensors_is_found",
          "An engine with stale tensors would sample for a run in fp32."),
    Fault("engine-compared-with-the-steps-since-the-resume",
          "mindspeed_rl.metrics.agreement:EngineAgreement.__init__",
          takes(first=lambda _: ()),
          _REPORT + "test_a_resumed_run_compares_its_engine_with_the_first_steps_of_all",
          "Each restart would take the mismatch that it finds for the usual one."),
    Fault("sums-over-tokens-forget-context",
          "mindspeed_rl.trainer.train_engine:TrainEngine.all_reduce_dp_cp",
          _forgets_context, _STATE + "test_sums_over_tokens_are_over_the_context_as_well",
          "KL in the reward and whitening would see a part of each sequence."),
    Fault("gae-decay-is-gamma", "mindspeed_rl.algorithms.token_advantages:generalized_advantages",
          lambda original: (lambda *args, discount, trace_decay: original(*args,
          discount=discount, trace_decay=discount)),
          _PPO + "test_advantages_and_returns_of_every_token",
          "--gae-lambda would do nothing."),
    # --- the dry run
    Fault("a-save-takes-no-memory",
          "mindspeed_rl.planning.prediction:MemoryPrediction.save_host_bytes",
          gives(lambda _: 0),
          _PLANNING + "test_phases.py::test_a_save_takes_what_it_copies",
          "A run whose host is full at its first checkpoint would be said to fit."),
    Fault("the-dry-run-asks-no-engine", "mindspeed_rl.planning.findings:check_engine", skipped,
          _PLANNING + "test_engine_refusals.py::"
          "test_flags_that_the_engine_of_the_machine_lacks_are_refused",
          "Runs that a start refuses would be said to fit."),
    Fault("nobody-waits-for-the-longest-response", "mindspeed_rl.planning.step_time:decode_batches",
          gives(lambda steps: type(steps)({n: count // 2 for n, count in steps.items()})),
          _PLANNING + "test_step_time.py::test_decoding_ends_with_the_longest_response",
          "Rollouts would be predicted without their tail."),
    # --- settings
    Fault("clip-flags-swapped", "mindspeed_rl.rl.update:loss_settings",
          gives(_swapped_bounds),
          "tests/unit/rl/test_step.py::test_each_clip_flag_bounds_its_own_side",
          "Clip-higher would bound the wrong side."),
    Fault("covariance-seed-does-not-follow-the-update",
          "mindspeed_rl.rl.update:selection_seed",
          takes(update=lambda _: 0), _SETTINGS + "test_every_update_selects_with_a_seed_of_its_own",
          "Every update would hold back tokens at the same places."),
    Fault("critic-clips-by-the-policys-epsilon",
          "mindspeed_rl.rl.critic:critic_loss",
          lambda original: (lambda config: partial(original(config),
          clip=config.surrogate.eps_upper)),
          _SETTINGS + "test_the_critic_has_a_clip_of_its_own",
          "--value-clip would do nothing."),
    Fault("kl-in-reward-and-in-loss", "mindspeed_rl.rl.update:loss_settings",
          lambda original: (lambda config, kl_beta: replace(original(config, kl_beta),
          kl_beta=kl_beta)),
          _ALGORITHMS + "test_the_kl_of_its_tokens_is_taken_from_the_reward_of_a_sample",
          "The KL would count twice."),
    # --- optimizer and schedule
    Fault("adam-beta2-is-beta1", "mindspeed_rl.trainer.optimizer:OptimizerConfig",
          _with_setting(adam_beta2=lambda given: given["adam_beta1"]),
          _OPTIMIZER + "test_every_flag_reaches_the_optimizer",
          "Second moments would forget ten times as fast."),
    Fault("gradients-not-clipped", "mindspeed_rl.trainer.optimizer:OptimizerConfig",
          _with_setting(clip_grad=lambda _: 0.0),
          _OPTIMIZER + "test_every_flag_reaches_the_optimizer",
          "One bad batch would undo a run."),
    Fault("weight-decay-forgotten", "mindspeed_rl.trainer.optimizer:OptimizerConfig",
          _with_setting(weight_decay=lambda _: 0.0),
          _OPTIMIZER + "test_every_flag_reaches_the_optimizer",
          "--weight-decay would do nothing."),
    # --- checkpoints and resuming
    Fault("no-checkpoint-at-the-end", "mindspeed_rl.checkpoint.save_clock:save_is_due",
          takes(train_iters=lambda _: 0),
          _RESUME + "test_a_checkpoint_is_due_at_every_interval_and_at_the_end",
          "The last steps of a run would be lost."),
    Fault("best-checkpoint-removed", "mindspeed_rl.checkpoint.retention:removable",
          takes(best=lambda _: None),
          "tests/unit/checkpoint/test_retention.py::"
          "test_the_best_outlives_the_limit_and_a_resume",
          "--save-best-metric would keep nothing."),
    Fault("every-clock-counts", "mindspeed_rl.checkpoint.save_clock:SaveClock.votes",
          takes(keeps_time=lambda _: True),
          "tests/unit/checkpoint/test_save_clock.py::"
          "test_only_one_clock_counts_and_any_signal_does",
          "Ranks with other clocks would end the run or save at another step."),
    Fault("resume-skips-one-batch", "mindspeed_rl.rl.resume:start",
          _when_resumed(_skips_a_batch), _CONTINUES,
          "Prompts would be left out of the epoch."),
    Fault("kl-coefficient-not-restored", "mindspeed_rl.rl.resume:start",
          _when_resumed(_kl_beta_of_the_flags), _CONTINUES,
          "An adapted coefficient would start again at every restart."),
    Fault("version-not-restored", "mindspeed_rl.rl.resume:start",
          _when_resumed(_version_0), _CONTINUES,
          "Carried samples would be taken for those of other weights."),
    Fault("schedule-of-the-policy-not-restored",
          "mindspeed_rl.trainer_state.checkpoint:load_checkpoint",
          then(lambda _, engine, *__: setattr(engine.schedule, "num_updates", 0)),
          _STATE + "test_both_schedules_go_on",
          "A resumed run would warm up again."),
    Fault("schedule-of-the-critic-not-restored",
          "mindspeed_rl.trainer_state.checkpoint:_load_companion",
          then(lambda _, __, engine, *___: setattr(engine.schedule, "num_updates", 0)),
          _STATE + "test_both_schedules_go_on",
          "The critic would warm up again while the policy does not."),
    Fault("torch-rng-not-restored", "mindspeed_rl.trainer_state.random_state:set_rng_state",
          lambda original: lambda platform, state: original(platform, state | {"torch": _here()}),
          _STATE + "test_random_numbers_go_on",
          "Dropout of a resumed run would draw other numbers."),
    # --- evaluation and rewards
    Fault("evaluation-with-the-seeds-of-training",
          "mindspeed_rl.generation.rollout_worker:RolloutWorker.run",
          _as_in_training,
          _REPORT + "test_sampled_evaluations_have_seeds_and_a_temperature_of_their_own",
          "Sampled evaluations would not be independent of what was trained on."),
    Fault("evaluation-at-another-temperature", "mindspeed_rl.generation.evaluate:_passes",
          takes(flags=lambda flags: replace(flags, rl_eval_temperature=1.0)),
          _REPORT + "test_sampled_evaluations_have_seeds_and_a_temperature_of_their_own",
          "Accuracy would be that of another way to answer."),
    Fault("a-dead-worker-fails-another-sample", "mindspeed_rl.rewards.pool:RewardPool.score",
          gives(_blames_the_neighbour),
          "tests/unit/rewards/test_faults.py::test_a_dead_worker_costs_the_sample_that_killed_it",
          "Innocent samples would lose their reward and the guilty one be scored."),
    # --- replaying a step
    Fault("replay-from-a-later-checkpoint", "mindspeed_rl.checkpoint.resume:find_latest",
          takes(before=lambda _: None),
          "tests/unit/checkpoint/test_resume.py::"
          "test_a_step_asks_for_the_newest_checkpoint_before_it",
          "A replay would compare the step with weights that it has trained itself."),
    Fault("digests-without-places", "mindspeed_rl.replay.digests:signs",
          gives(lambda signs: signs * 0.0 + 1.0),
          "tests/unit/replay/test_digests.py::test_a_digest_knows_the_places_of_elements",
          "Rows, experts or tokens in each other's place would pass as equal."),
    # --- restarts
    Fault("a-node-that-comes-back-begins-anew",
          "mindspeed_rl.launch.watchdog:Watchdog.newest_attempt",
          gives(lambda attempt: attempt._replace(restarts=0)),
          "tests/unit/launch/test_failures.py::"
          "test_a_node_that_comes_back_learns_of_the_attempt_of_the_others",
          "Its ranks would load other weights than the ranks that restarted."),
    # --- copies in memory
    Fault("copy-without-moments", "mindspeed_rl.peers.state:_optimizer_tensors",
          returns({}), _PEERS + "test_a_job_goes_on_from_the_newest_whole_copies",
          "After a restart the optimizer would begin anew."),
    Fault("a-copy-that-failed-to-travel-counts", "mindspeed_rl.peers.copies:PeerCopies._exchange",
          then(lambda copies, step: setattr(copies, "_problem", "")),
          "tests/unit/peers/test_copies.py::test_a_transfer_that_fails_leaves_the_copy_before",
          "The only whole copy would be removed for one that nobody has."),
    Fault("responses-cut-in-another-place", "mindspeed_rl.samples.saved_responses:_responses",
          takes(lengths=lambda lengths: list(reversed(lengths))),
          "tests/unit/rl/test_dynamic_sampling.py::"
          "test_an_older_checkpoint_has_the_tokens_as_numbers",
          "After a resume, tokens of one response would be trained on as those of another."),
    Fault("nan-after-numbers-unseen", "mindspeed_rl.core.alarms:_next",
          takes(value=lambda value: value if value == value else 0.0),
          "tests/unit/core/test_alarms.py::"
          "test_a_metric_that_stops_being_a_number_is_told_once",
          "A loss or KL that is NaN would be told by nobody."),
    Fault("one-of-the-ranks-behind-is-named", "mindspeed_rl.core.flights:_of_group",
          takes(behind=lambda behind: behind[:1]),
          "tests/unit/core/test_flights.py::"
          "test_the_rank_that_is_ahead_nowhere_comes_first",
          "The message about a hang would name other ranks than those that are missing."),
    Fault("damaged-copy-is-taken", "mindspeed_rl.peers.copies:problem_of_copy",
          returns(""), _PEERS + "test_a_job_goes_on_from_the_newest_whole_copies",
          "A flipped bit in shared memory would change every number after a restart."),
    Fault("copy-of-another-layout-is-taken", "mindspeed_rl.peers.placement:newest_complete",
          takes(runs=lambda runs: ["x", "y"]),
          "tests/unit/peers/test_placement.py::test_the_newest_step_that_all_ranks_have_is_taken",
          "A rank would go on from the weights of another one."),
    # --- what strangers may have written
    Fault("indices-may-hold-objects", "mindspeed_rl.trainer.indexed_data:_arrays_only",
          lambda original: nullcontext,
          "tests/unit/trainer/test_indexed_data.py::"
          "test_an_index_that_is_no_array_is_refused_and_not_executed",
          "Whoever can write beside the data could run any code in the training process."),
    Fault("drafts-of-any-token", "mindspeed_rl.rollout.draft_history:DraftHistory.load",
          takes(vocab_size=lambda vocab_size: 1 << 40),
          "tests/unit/rollout/test_draft_history.py::"
          "test_a_file_with_tokens_that_the_model_does_not_have_is_dropped_whole",
          "The engine would look up rows of the embedding that are not there."),
    Fault("errors-with-passwords", "mindspeed_rl.core.errors:redacted_text",
          lambda original: str,
          "tests/unit/metrics/test_redaction.py::test_errors_about_flags_show_no_secrets",
          "Passwords in URLs would be in the logs of every node."),
    # --- other divisions: of optimizers, of nodes
    Fault("regrouped-optimizer-without-step", "mindspeed_rl.checkpoint.expert_optimizers:give_step",
          returns(None),
          "tests/unit/checkpoint/test_expert_optimizers.py::"
          "test_the_step_is_that_of_the_checkpoint",
          "The first updates after a resume would be corrected for a bias that is long gone."),
    Fault("two-nodes-are-the-first", "mindspeed_rl.elastic.commands:in_round",
          gives(lambda command: replace(command, node=0)),
          "tests/unit/elastic/test_elastic.py::test_a_node_starts_with_the_numbers_of_the_attempt",
          "Two nodes would each open a store and wait for the other."),
    Fault("nobody-is-waited-for", "mindspeed_rl.elastic.meeting:may_start",
          returns(True),
          "tests/unit/elastic/test_elastic.py::"
          "test_a_start_waits_for_all_and_a_restart_for_the_fewest",
          "Every crash would cost the nodes whose ranks end a moment later."),
    Fault("silent-nodes-are-left-out", "mindspeed_rl.elastic.meeting:waiting_for",
          gives(lambda found: (found[0], True)),
          "tests/unit/elastic/test_elastic.py::"
          "test_a_node_that_is_silent_when_the_others_decide_is_not_left_out",
          "A shared disk that stands still for seconds would cost nodes that live."),
)  # fmt: skip


def _here() -> Any:
    import torch

    return torch.get_rng_state()
