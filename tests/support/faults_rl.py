"""Named faults of the RL step: its wiring, the exchange of samples, the switch of phases."""

from __future__ import annotations

from support.mutation import Mutation

_RL_STEP = "tests/unit/test_rl_step.py::"
_TABLE = "tests/unit/test_sample_table.py::"
_CACHE = "tests/unit/test_tensor_cache.py::"
_MOVES = "tests/unit/test_redistribution.py::"
_PHASES = "tests/unit/test_phases.py::"

RL_MUTATIONS = (
    Mutation(
        "advantage-negated",
        "orchestration/rl_batch.py",
        "of_sample, known = values.to(device)",
        "of_sample, known = -values.to(device)",
        _RL_STEP + "test_gradient_of_one_step_in_closed_form",
    ),
    Mutation(
        "advantages-shifted-by-one-sample",
        "orchestration/rl_batch.py",
        "order = [index[i] for i in micro.batch.sample_ids]",
        "order = [index[i] - 1 for i in micro.batch.sample_ids]",
        _RL_STEP + "test_gradient_of_one_step_in_closed_form",
    ),
    Mutation(
        "advantages-over-the-batch-not-the-group",
        "orchestration/rl_batch.py",
        "rewards.view(-1, size), lengths,",
        "rewards.view(1, -1), lengths,",
        _RL_STEP + "test_advantages_are_relative_to_the_own_group",
    ),
    Mutation(
        "siblings-grouped-across-prompts",
        "orchestration/rl_step.py",
        "[p for i in indices for p in [run.prompts[i]] * size]",
        "[run.prompts[i] for i in indices] * size",
        _RL_STEP + "test_collect_gives_every_sample_with_its_prompt_and_reward",
    ),
    Mutation(
        "control-shuffles-nothing",
        "orchestration/rl_batch.py",
        'random.Random(f"{run.config.train.seed}/{step}").shuffle(rewards)',
        'random.Random(f"{run.config.train.seed}/{step}").shuffle(list(rewards))',
        _RL_STEP + "test_shuffled_rewards_are_the_same_rewards_at_other_samples",
    ),
    Mutation(
        "samples-of-the-first-update-in-every-one",
        "orchestration/rl_samples.py",
        "train_samples([number * size + i for i in mine])",
        "train_samples(mine)",
        _RL_STEP + "test_every_token_is_trained_once_with_its_samples_advantage",
    ),
    Mutation(
        "on-policy-check-removed",
        "orchestration/rl_batch.py",
        "        check_on_policy(run, samples)\n",
        "        pass\n",
        _RL_STEP + "test_on_policy_samples_must_come_from_the_present_weights",
    ),
    Mutation(
        "later-updates-take-their-own-logprobs-as-old",
        "orchestration/rl_batch.py",
        'own = choice == "on-policy" and first and not early',
        'own = choice == "on-policy" and not early',
        _RL_STEP + "test_later_updates_are_weighted_by_the_ratio_to_the_sampling_weights",
    ),
    Mutation(
        "learning-counted-as-mismatch",
        "orchestration/rl_step.py",
        "if known is None and first_update:",
        "if known is None:",
        _RL_STEP + "test_mismatch_is_taken_at_the_weights_that_sampled",
    ),
    Mutation(
        "nan-passes-the-probe",
        "orchestration/rl_step.py",
        "if not gap <= limit:",
        "if gap > limit:",
        _RL_STEP + "test_an_engine_that_computes_with_stale_tensors_is_found",
    ),
    Mutation(
        "truncated-counts-as-stopped",
        "experience/samples.py",
        "int(not done.truncated),",
        "1,",
        _TABLE + "test_tables_and_tensors_say_what_the_engine_said",
    ),
    Mutation(
        "parts-take-the-place-of-the-reward",
        "experience/samples.py",
        "return [reward, *(",
        "return [*(",
        _TABLE + "test_tables_and_tensors_say_what_the_engine_said",
    ),
    Mutation(
        "lost-samples-go-unnoticed",
        "experience/samples.py",
        "if seen != [1] * num_samples + [0]:",
        "if max(seen) > 1:",
        _TABLE + "test_a_sample_that_is_lost_or_doubled_stops_the_step",
    ),
    Mutation(
        "ranks-of-an-engine-may-differ",
        "experience/samples.py",
        "    if differing:\n",
        "    if len(differing) > num_samples:\n",
        _TABLE + "test_ranks_of_an_engine_that_differ_stop_the_step",
    ),
    Mutation(
        "an-entry-is-overwritten",
        "experience/tensor_cache.py",
        "        if version in entry:\n            raise",
        "        if version < 0:\n            raise",
        _CACHE + "test_an_entry_is_written_once",
    ),
    Mutation(
        "another-version-is-read-in-its-place",
        "experience/tensor_cache.py",
        "        if entry:\n            why",
        "        if entry:\n            return next(iter(entry.values()))\n            why",
        _CACHE + "test_nothing_else_is_read_in_its_place",
    ),
    Mutation(
        "a-step-keeps-the-samples-of-the-last",
        "experience/tensor_cache.py",
        "            if key in kept\n",
        "",
        _CACHE + "test_a_new_step_drops_all_but_what_is_carried_over",
    ),
    Mutation(
        "what-is-carried-over-holds-its-batch",
        "experience/tensor_cache.py",
        "part.of(column).clone()",
        "part.of(column)",
        _CACHE + "test_a_new_step_drops_all_but_what_is_carried_over",
    ),
    Mutation(
        "samples-travel-to-where-they-are",
        "data/routes.py",
        "np.flatnonzero(~(ranks // own % layout.dp == wanted[:, None]).any(1))",
        "np.arange(len(wanted))",
        _MOVES + "test_nothing_moves_where_source_and_destination_agree",
    ),
    Mutation(
        "only-the-first-holder-counts",
        "data/routes.py",
        "have = (ranks[self._items, :, None] == self._rank_of).any(1)",
        "have = (ranks[self._items, :1, None] == self._rank_of).any(1)",
        _MOVES + "test_every_rank_receives_a_sample_at_most_once",
    ),
    Mutation(
        "messages-in-the-order-of-arrival",
        "experience/redistribute.py",
        "for peer in leg.peers:\n            for item in leg.receives",
        "for peer in reversed(leg.peers):\n            for item in leg.receives",
        _MOVES + "test_every_rank_gets_what_it_trains_on_bit_for_bit",
    ),
    Mutation(
        "stages-between-get-the-samples",
        "data/routes.py",
        "block.serve(axis, sorted(stages))",
        "block.serve(axis, range(layout.pp))",
        _MOVES + "test_stages_between_get_nothing",
    ),
    Mutation(
        "failed-undo-goes-on",
        "phases/machine.py",
        "self.state = Phase.BROKEN",
        "pass",
        _PHASES + "test_an_undo_that_fails_breaks_the_machine",
    ),
    Mutation(
        "fault-in-a-transition-is-not-undone",
        "phases/transition.py",
        "                action.undo()\n",
        "                pass\n",
        _PHASES + "test_a_fault_in_any_action_leaves_one_of_the_two_states[True-none]",
    ),
    Mutation(
        "cache-comes-beside-the-parameters",
        "phases/machine.py",
        "            *self._offload(Owner.PARAMETERS),\n",
        "",
        _PHASES + "test_the_order_with_everything_offloaded",
    ),
    Mutation(
        "failed-sync-is-not-proven-again",
        "phases/weight_sync.py",
        "number, self._num_syncs = self._num_syncs, 0",
        "number = self._num_syncs",
        _PHASES + "test_weights_that_differ_are_never_generated_from",
    ),
    Mutation(
        "stale-engine-after-an-update",
        "phases/weight_sync.py",
        "if engine.weights_version == version:",
        "if engine.weights_version >= 0:",
        _PHASES + "test_weights_move_only_when_their_version_changed",
    ),
    Mutation(
        "both-rounds-in-one-staging",
        "resharding/executor.py",
        "staging[i % len(staging)]",
        "staging[0]",
        "tests/simulated/test_planner.py::test_export_puts_whole_tensors_on_the_writer",
    ),
    Mutation(
        "a-third-round-in-flight",
        "resharding/executor.py",
        "[self._new_staging() for _ in range(self._num_slots)]",
        "[self._new_staging() for _ in range(self._num_slots + 1)]",
        "tests/distributed/test_reshard.py::test_staging_stays_within_the_bucket[tiny-tp1-float32]",
    ),
    Mutation(
        "plans-not-compared",
        "resharding/executor.py",
        "            self._compare_plans()\n",
        "            pass\n",
        "tests/simulated/test_plan_agreement.py::"
        "test_ranks_with_another_plan_are_named_on_all_ranks[0-precision]",
    ),
)
