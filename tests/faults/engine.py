"""A stale engine or cache, samples of other seeds or other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.planting import Fault, keeps, skipped, takes, without

_ENGINE = "tests/unit/engines/test_vllm_engine.py::"
_CACHE = "tests/unit/samples/test_tensor_cache.py::"
_REQUESTS = "tests/unit/engines/test_engine_requests.py::"
_SHARED = (
    "tests/unit/rl/test_report.py::"
    "test_an_evaluation_in_the_rollouts_of_a_step_has_the_same_results"
)
_UNCHANGED = "tests/simulated/test_rebalance.py::test_nothing_is_lost_doubled_or_changed"


def _own_tokens_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, outputs: Any, version: int) -> Any:
        before = {i: len(self._open[i].prefix_tokens) for i in outputs}
        found = original(self, outputs, version)
        return {i: replace(c, token_ids=c.token_ids[before[i] :]) for i, c in found.items()}

    return changed


def _forgets_what_is_known(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, outputs: Any, version: int) -> Any:
        self._known = dict.fromkeys(self._known, 0)
        return original(self, outputs, version)

    return changed


def _any_entry(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, column: Any, key: Any, version: int) -> Any:
        entry = self._entries.get(column.name, {}).get(key, {})
        return next(iter(entry.values())) if entry else original(self, column, key, version)

    return changed


def _overwrites(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, column: Any, keys: Any, versions: Any, parts: Any) -> None:
        for key, version in zip(keys, versions, strict=True):
            self._entries.get(column.name, {}).get(key, {}).pop(version, None)
        original(self, column, keys, versions, parts)

    return changed


def _each_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(sampled: Any, drafted: Any, counts: Any) -> Any:
        kept = original(sampled, sampled[:, :-1], counts)
        kept[:, 1:] &= sampled[:, :-1] == drafted
        return kept

    return changed


def _own_plan(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, seconds: float) -> None:
        self._from_leader = lambda plan: plan
        original(self, seconds)

    return changed


def _seed_of_the_number(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, part: Any, i: int, number: int, settings: Any) -> Any:
        found = original(self, part, i, number, settings)
        return replace(found, seed=found.seed + number - i)

    return changed


def _one_temperature(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: replace(original(*arguments), temperature=None)


def _one_position(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(metadata: Any, counts: Any) -> Any:
        found, before = original(metadata, counts), metadata.generators.positions
        rows = [p for p, n in zip(before.tolist(), counts, strict=True) for _ in range(n)]
        found.generators = replace(found.generators, positions=before.new_tensor(rows))
        return found

    return changed


def _all_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(snapshot: Any) -> Any:
        free = [dict(block, state="inactive") for part in snapshot for block in part["blocks"]]
        return original([{"address": part["address"], "blocks": free} for part in snapshot])

    return changed


def _nothing_is_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, row: int, further: Any, chosen: Any) -> None:
        from vllm import forward_context

        context = forward_context.get_forward_context()
        assert context.is_padding is not None
        context.is_padding = context.is_padding & False
        original(self, row, further, chosen)

    return changed


def _own_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*arguments: Any) -> Any:
        return {k: v for k, v in original(*arguments).items() if k != "moe_backend"}

    return changed


ENGINE = (
    Fault("weights-sleep-without-their-contents",
          "mindspeed_rl.platforms.kept_memory:KeptMemory._fill", skipped,
          "tests/unit/engines/test_vllm_engine.py::"
          "test_weights_that_are_kept_come_back_with_their_bits_and_version",
          "Changes would be added to zeros after every sleep."),
    Fault("plain-tensors-of-the-engine-count-as-free-memory",
          "mindspeed_rl.platforms.cached_memory:free_ranges", _all_blocks,
          "tests/unit/engines/test_cuda_memory.py::test_cached_memory_of_no_tensor_is_found",
          "Rotary tables and ids of experts would be garbage once an engine has slept."),
    Fault("the-kernel-of-experts-on-gpus-is-the-engines-choice",
          "mindspeed_rl.engines.vllm.arguments:model_settings", _own_kernels,
          "tests/unit/engines/test_cuda_sources.py::test_vllm_knows_every_argument",
          "Some GPUs would get kernels that swap the halves of every expert at load."),
    Fault("any-model-runner-is-as-good",
          "mindspeed_rl.engines.vllm.cuda_arguments:check_runner",
          lambda original: lambda environ: None,
          "tests/unit/engines/test_cuda_memory.py::"
          "test_another_runner_is_refused_before_it_samples",
          "What is read of runner V1 would be read of V2, whose parts are others."),
    Fault("a-draft-is-kept-beyond-its-first-wrong-token",
          "mindspeed_rl.algorithms.drafted_tokens:kept_places", _each_alone,
          "tests/unit/engines/test_drafting.py::"
          "test_a_draft_is_kept_up_to_the_first_token_that_is_not_sampled",
          "Tokens would be sampled after tokens that the response does not have."),
    Fault("a-draft-model-is-drawn-at-random",
          "mindspeed_rl.vllm_patches.draft_weights:_with_own_loading",
          lambda original: lambda method: method,
          "tests/unit/rollout/test_draft_model.py::"
          "test_a_draft_model_is_not_loaded_like_the_policy",
          "Hardly any of its drafts would be right, without an error."),
    Fault("every-rank-has-all-of-a-draft-model",
          "mindspeed_rl.rollout.draft_model:DraftModel.elements",
          lambda original: lambda self, tp: original(self, 1),
          "tests/unit/rollout/test_draft_model.py::"
          "test_sizes_of_a_draft_model_are_those_of_its_files",
          "A dry run would find that a model does not fit which does."),
    Fault("the-cache-of-a-draft-model-is-free",
          "mindspeed_rl.rollout.draft_model:cached_values",
          lambda original: lambda spec, draft, tp: original(spec, None, tp),
          "tests/unit/rollout/test_draft_model.py::"
          "test_sizes_of_a_draft_model_are_those_of_its_files",
          "The cache that a run chooses would hold fewer responses than it says."),
    Fault("a-cache-has-no-whole-blocks",
          "mindspeed_rl.rollout.provider:EngineSizes.sequence_tokens",
          lambda original: lambda self, longest: longest,
          "tests/unit/planning/test_cache_size.py::"
          "test_a_sequence_takes_whole_blocks_and_one_that_the_engine_keeps",
          "An engine would refuse the cache that was chosen for a short sequence."),
    Fault("each-rank-drafts-by-its-own-seconds",
          "mindspeed_rl.rollout.draft_source:DraftSource.end_step", _own_plan,
          "tests/unit/engines/test_drafting.py::test_ranks_follow_the_plan_of_the_first",
          "Ranks of an engine would compute different tokens in one step."),
    Fault("a-table-has-experts-where-slots-belong",
          "mindspeed_rl.engines.vllm_ascend.expert_slots:place_experts",
          lambda original: lambda model, layers, position, count: original(
              model, [(n, tuple(sorted(slots, key=slots.__getitem__))) for n, slots in layers],
              position, count),
          "tests/unit/engines/test_expert_slots.py::"
          "test_a_table_says_the_slot_of_each_expert_and_changes_in_place",
          "vLLM-Ascend would send tokens to the wrong experts."),
    Fault("experts-are-counted-by-their-slots",
          "mindspeed_rl.engines.vllm_ascend.expert_slots:experts_by_slot",
          lambda original: lambda table: table.argsort().argsort(),
          "tests/unit/engines/test_expert_slots.py::"
          "test_tokens_count_for_the_experts_in_the_slots_of_the_rank",
          "Experts that have moved would move again for the tokens of others."),
    Fault("rows-without-a-token-count-for-experts",
          "mindspeed_rl.engines.vllm.expert_load:ExpertLoad._add", _nothing_is_padding,
          "tests/unit/engines/test_expert_maps.py::"
          "test_tokens_are_counted_by_expert_until_they_are_taken",
          "Experts would move for tokens of an earlier step, which a dummy computes again."),
    Fault("every-tensor-parallel-rank-counts-its-tokens",
          "mindspeed_rl.expert_placement.counted_rows:counted_rows",
          lambda original: lambda seen, batch, ranks, shares, engine, rank: replace(
              original(seen, batch, ranks, shares, engine, rank), count=batch),
          "tests/unit/expert_placement/test_counted_rows.py::"
          "test_one_data_parallel_rank_has_no_numbers_of_others",
          "Tokens would count several times, some of them more often than others."),
    Fault("experts-of-drafted-tokens-that-are-not-kept",
          "mindspeed_rl.vllm_patches.routed_experts:_ComputedRows.of",
          lambda original: lambda self, response, first: self.experts,
          "tests/unit/samples/test_routed_experts.py::"
          "test_tokens_of_a_draft_that_are_not_kept_have_no_experts",
          "The trainer would replay the experts of tokens that no response has."),
    Fault("one-noise-for-all-tokens-of-a-draft",
          "mindspeed_rl.vllm_patches.verified_drafts:per_row", _one_position,
          "tests/unit/engines/test_drafting.py::"
          "test_each_row_has_the_seed_of_its_request_and_a_position_of_its_own",
          "Drafts would change which tokens are sampled, and repeat those that repeat."),
    Fault("prefix-cache-survives-an-update",
          "mindspeed_rl.engines.vllm.engine:VllmEngine.finish_update",
          without("_reset_prefix_cache"), _ENGINE + "test_no_cached_prefix_survives_an_update",
          "Prompts seen before would be continued from keys and values of older weights."),
    Fault("a-paused-response-is-read-as-its-last-part",
          "mindspeed_rl.rollout.open_requests:OpenRequests.finish", _forgets_what_is_known,
          "tests/unit/rollout/test_open_requests.py::"
          "test_a_response_in_parts_has_every_token_once",
          "A response that paused would have the tokens of its first part twice."),
    Fault("a-turn-of-another-engine-is-lost",
          "mindspeed_rl.generation.multi_turn:Conversations.leaving",
          lambda original: lambda self: {},
          "tests/unit/generation/test_visits.py::"
          "test_turns_go_to_the_environment_of_their_conversation",
          "A conversation that had moved would never end, and neither would the step."),
    Fault("prefix-cache-survives-sleep", "mindspeed_rl.engines.vllm.engine:VllmEngine.free_cache",
          without("_reset_prefix_cache"),
          _ENGINE + "test_no_cached_prefix_survives_sleep_at_an_unchanged_version",
          "Every chat template is a common prefix, whose blocks are zeros after waking."),
    Fault("any-version-of-the-weights-generates",
          "mindspeed_rl.engines.vllm.engine:VllmEngine._require",
          lambda original: lambda self, call, _: original(self, call, self._version),
          _ENGINE + "test_weights_of_another_version_do_not_generate",
          "Samples of other weights would count as on-policy."),
    Fault("experts-of-the-token-after",
          "mindspeed_rl.engines.vllm_ascend.routed_experts:ReturnedExperts.take",
          lambda original: lambda self, name, output, first, count: original(
              self, name, output, first + 1, count),
          "tests/unit/samples/test_routed_experts.py::"
          "test_what_vllm_ascend_returns_is_cut_to_the_response",
          "The trainer would replay the experts of another token."),
    Fault("an-evaluation-in-rollouts-has-other-seeds",
          "mindspeed_rl.generation.rollout_worker:RolloutWorker._request", _seed_of_the_number,
          _SHARED, "Its results would depend on how many samples a step has."),
    Fault("an-evaluation-in-rollouts-is-not-greedy",
          "mindspeed_rl.generation.rollout_worker:RolloutWorker._request", _one_temperature,
          _SHARED, "Accuracy would be that of samples at the temperature of training."),
    Fault("half-an-update-generates", "mindspeed_rl.engines.vllm.engine:VllmEngine.begin_update",
          keeps("_version"), _ENGINE + "test_half_written_weights_do_not_generate",
          "After a failed sync the engine would sample from a mixture of two versions."),
    Fault("logprobs-from-before-the-temperature",
          "mindspeed_rl.engines.vllm_ascend.sampling:report_processed_logprobs", skipped,
          "tests/unit/engines/test_ascend_process.py::"
          "test_both_parts_of_the_sampler_report_processed_logprobs",
          "Rollout log-probs on NPUs would be those of another distribution."),
    Fault("seeds-forget-the-step", "mindspeed_rl.rollout.requests:request_seed",
          takes(step=lambda _: 0), _REQUESTS + "test_seeds_of_a_run_are_all_different",
          "Every step would draw with the same random numbers."),
    Fault("the-same-noise-at-every-token",
          "mindspeed_rl.algorithms.sampling_noise:draw_keys",
          takes(positions=lambda positions: [0] * len(positions)),
          "tests/unit/algorithms/test_sampling_noise.py::test_a_row_follows_from_its_seed_and_draw_alone",
          "A request would draw the same random numbers at every token."),
    Fault("tokens-of-an-earlier-engine-lost",
          "mindspeed_rl.rollout.open_requests:OpenRequests.finish",
          _own_tokens_only, _UNCHANGED,
          "A moved response would lose its beginning."),
    Fault("an-entry-of-the-cache-is-overwritten",
          "mindspeed_rl.samples.device_cache:TensorCache.put_parts",
          _overwrites, _CACHE + "test_an_entry_is_written_once",
          "Two samples under one name would be trained on as one."),
    Fault("another-version-is-read-from-the-cache",
          "mindspeed_rl.samples.device_cache:TensorCache.find",
          _any_entry, _CACHE + "test_nothing_else_is_read_in_its_place",
          "Log-probs of earlier weights would be taken for those of the sample."),
    Fault("work-in-any-phase", "mindspeed_rl.colocation.scheduler:DeviceScheduler.require",
          skipped,
          "tests/unit/rl/test_phase_requirements.py::test_refused_while_the_engine_has_the_device[save]",
          "A checkpoint would be written while parameters are away from the device."),
)  # fmt: skip
