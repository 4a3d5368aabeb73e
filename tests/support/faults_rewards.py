"""Named faults of rewards, environments, evaluation and the report."""

from __future__ import annotations

from support.mutation import Mutation

_CODE = "tests/unit/test_rewards_code.py::"
_REMOTE = "tests/unit/test_rewards_remote.py::"
_STEP = "tests/unit/test_rl_step.py::"
_TALK = "tests/unit/test_environments.py::"

REWARD_MUTATIONS = (
    Mutation("a-program-that-ends-early-passes", "rewards/code.py",
             ' and ended.stdout.endswith("\\n" + word)', "",
             _CODE + "test_a_program_that_ends_early_does_not_pass"),
    Mutation("a-broken-sandbox-scores-zero", "rewards/sandbox.py",
             "if _written(report) != sandbox_launcher.STARTED:", "if False:",
             _CODE + "test_bad_tests_and_a_broken_sandbox_are_errors_and_no_zero"),
    Mutation("a-network-said-to-be-closed-is-open", "rewards/sandbox_launcher.py",
             "_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID", "_CLONE_NEWUSER | _CLONE_NEWPID",
             _CODE + "test_what_is_said_to_be_closed_is_closed"),
    Mutation("a-refusal-is-asked-again", "rewards/remote.py",
             "if error.code not in _TRANSIENT:", "if False:",
             _REMOTE + "test_a_refusal_is_final"),
    Mutation("one-request-at-a-time", "rewards/remote.py",
             'ThreadPoolExecutor(settings.concurrency, "remote-reward")',
             'ThreadPoolExecutor(1, "remote-reward")',
             _REMOTE + "test_requests_overlap_up_to_the_limit_and_order_is_kept"),
    Mutation("a-rows-own-weights-ignored", "rewards/scoring.py",
             "total += weights[reward.label] * part", "total += reward.weight * part",
             "tests/unit/test_rewards_builtin.py::test_only_the_rewards_of_the_row_are_called"),
    Mutation("a-tolerance-below-one-is-absolute-zero", "rewards/numeric.py",
             "tolerance * max(1.0, abs(wanted))", "tolerance * abs(wanted)",
             "tests/unit/test_rewards_builtin.py::"
             "test_the_tolerance_is_relative_and_from_the_row"),
    Mutation("rewards-of-other-samples", "orchestration/rl_rollout.py",
             "zip(self._rollouts, results, strict=True)",
             "zip(sorted(self._rollouts, key=lambda r: r.sample_id), results, strict=True)",
             _STEP + "test_collect_gives_every_sample_with_its_prompt_and_reward"),
    Mutation("scoring-waits-for-the-last-sample", "orchestration/rl_rollout.py",
             "        scorer.poll()\n\n    rebalancer",
             "\n    rebalancer",
             _STEP + "test_finished_samples_are_scored_while_others_are_generated"),
    Mutation("the-environments-tokens-trained", "orchestration/rl_samples.py",
             "t if sampled else ~t", "t",
             _TALK + "test_turns_follow_each_other_and_only_the_models_tokens_are_trained"),
    Mutation("loss-mask-shifted-by-one", "data/packing.py",
             "first = start + sample.num_prompt_tokens - 1",
             "first = start + sample.num_prompt_tokens - 2",
             _TALK + "test_a_loss_mask_has_one_entry_per_token_behind_the_prompt"),
    Mutation("every-turn-with-the-same-seed", "orchestration/rl_episodes.py",
             "c.sample_id, attempt, turn)", "c.sample_id, attempt, 0)",
             _TALK + "test_turns_follow_each_other_and_only_the_models_tokens_are_trained"),
    Mutation("a-failed-environment-scores-zero", "orchestration/rl_episodes.py",
             'self._scorer.drop(episode.rollout("stop", self._run.version, trained=False))',
             'self._scorer.add(episode.rollout("stop", self._run.version), 0.0)',
             _TALK + "test_a_failing_environment_costs_its_sample"),
    Mutation("pass-at-k-with-replacement", "algorithms/pass_at_k.py",
             "1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)",
             "1.0 - (1.0 - num_right / num_samples) ** k",
             "tests/unit/test_pass_at_k.py::test_it_is_the_share_of_subsets_with_a_right_sample"),
    Mutation("a-response-runs-in-the-report", "observability/html_report.py",
             "html.escape(_cut(row.get('response')))", "_cut(row.get('response'))",
             "tests/unit/test_html_report.py::test_one_file_with_everything_in_it"),
    Mutation("an-evaluation-twice-after-a-resume", "observability/loggers.py",
             "self._purge_step = step\n", "self._purge_step = step + 1\n",
             "tests/unit/test_observability_logs.py::"
             "test_evaluations_are_logged_under_their_own_step"),
)  # fmt: skip
