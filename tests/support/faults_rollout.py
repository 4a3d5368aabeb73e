"""Named faults of who samples what: dealing, moving between engines, going on in the next step."""

from __future__ import annotations

from support.mutation import Mutation

_LENGTHS = "tests/unit/test_lengths.py::"
_REBALANCE = "tests/simulated/test_rebalance.py::"
_UNCHANGED = _REBALANCE + "test_nothing_is_lost_doubled_or_changed"
_PARTIAL = "tests/unit/test_partial_rollout.py::"

ROLLOUT_MUTATIONS = (
    Mutation(
        "lengths-of-all-prompts-taken-for-equal",
        "data/lengths.py",
        "scale = self._mean * self._relative.get(prompt, 1.0)",
        "scale = self._mean",
        _LENGTHS + "test_a_prompt_is_expected_to_be_as_long_as_it_was_beside_others",
    ),
    Mutation(
        "what-goes-on-expected-like-what-begins",
        "data/lengths.py",
        "beyond = spread.mean_beyond(generated / scale) if scale else None",
        "beyond = spread.mean_beyond(0) if scale else None",
        _LENGTHS + "test_what_goes_on_is_expected_to_be_longer_than_it_is",
    ),
    Mutation(
        "tokens-of-an-earlier-engine-lost",
        "rollout/open_requests.py",
        "token_ids=(*parcel.token_ids, *last.token_ids),",
        "token_ids=last.token_ids,",
        _UNCHANGED,
    ),
    Mutation(
        "a-moved-request-goes-on-without-its-tokens",
        "rollout/open_requests.py",
        "[*request.token_ids, *parcel.token_ids],",
        "[*request.token_ids],",
        _UNCHANGED,
    ),
    Mutation(
        "a-moved-request-may-be-longer",
        "rollout/open_requests.py",
        "limit - len(parcel.token_ids),",
        "limit,",
        _UNCHANGED,
    ),
    Mutation(
        "a-moved-request-draws-its-first-numbers-again",
        "rollout/open_requests.py",
        "stream=self._port.stream(name),",
        "stream=None,",
        _UNCHANGED,
    ),
    Mutation(
        "a-moved-request-stays-as-well",
        "rollout/open_requests.py",
        "        self._port.abort([str(sample_id) for sample_id in sample_ids])\n",
        "",
        _UNCHANGED,
    ),
    Mutation(
        "streams-cut-to-whole-words",
        "rollout/rebalance.py",
        "raw += bytes(-len(raw) % 8)",
        "raw = raw[: len(raw) // 8 * 8]",
        _REBALANCE + "test_messages_keep_every_bit",
    ),
    Mutation(
        "parcels-that-do-not-arrive-forgotten",
        "rollout/rebalance.py",
        "if missing := awaited - {p.request.sample_id for p in mine}:",
        "if missing := set():",
        _REBALANCE + "test_a_parcel_that_does_not_arrive_is_named",
    ),
    Mutation(
        "prefill-of-a-moved-request-is-free",
        "rollout/rebalance_plan.py",
        "time += 0.0 if load.computed else cost.prefill(load.context)",
        "time += 0.0",
        _REBALANCE + "test_a_move_must_gain_more_than_its_prefill_costs",
    ),
    Mutation(
        "contexts-cost-nothing",
        "rollout/rebalance_plan.py",
        "read = steps * context + running * steps * (steps - 1) // 2",
        "read = steps * (steps - 1) // 2",
        _REBALANCE + "test_a_segment_by_hand",
    ),
    Mutation(
        "engines-settle-at-the-same-step-not-time",
        "rollout/rebalance_plan.py",
        "found.append(max(interval, part.steps + alone))",
        "found.append(interval)",
        _REBALANCE + "test_engines_settle_at_the_same_time",
    ),
    Mutation(
        "begun-requests-move-although-they-may-not",
        "rollout/rebalance_plan.py",
        "    if running:\n        begun = ",
        "    if loads:\n        begun = ",
        _REBALANCE + "test_a_plan_never_makes_it_slower",
    ),
    Mutation(
        "one-version-for-all-tokens",
        "experience/samples.py",
        "return replace(self, spans=(*before.spans, span))",
        "return self",
        _PARTIAL + "test_every_token_knows_the_weights_that_sampled_it",
    ),
    Mutation(
        "older-tokens-taken-for-fresh",
        "orchestration/rl_batch.py",
        "- 2 + s.num_stale(run.version) for s in samples",
        "- 2 for s in samples",
        _PARTIAL + "test_the_ratio_is_to_the_weights_that_sampled",
    ),
    Mutation(
        "open-responses-forgotten",
        "orchestration/rl_partial.py",
        "run.pending = [group for group, goes_on in zip(whole, is_open, strict=True) if goes_on]",
        "run.pending = []",
        _PARTIAL + "test_every_group_is_trained_on_once_and_whole",
    ),
    Mutation(
        "open-responses-scored",
        "orchestration/rl_rollout.py",
        "(scorer.drop if goes_on else scorer.add)",
        "scorer.add",
        _PARTIAL + "test_a_response_is_scored_once_when_it_is_whole",
    ),
    Mutation(
        "what-was-said-is-sampled-again",
        "orchestration/rl_partial.py",
        "return replace(request, begun=tuple(tokens), begun_logprobs=tuple(logprobs))",
        "return request",
        _PARTIAL + "test_every_token_knows_the_weights_that_sampled_it",
    ),
)
