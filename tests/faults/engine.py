"""A stale engine or cache, samples of other seeds or other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.planting import Fault, keeps, skipped, takes, without

_ENGINE = "tests/unit/engines/test_vllm_engine.py::"
_CACHE = "tests/unit/samples/test_tensor_cache.py::"
_REQUESTS = "tests/unit/engines/test_engine_requests.py::"
_UNCHANGED = "tests/simulated/test_rebalance.py::test_nothing_is_lost_doubled_or_changed"


def _own_tokens_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, outputs: Any, version: int) -> Any:
        before = {i: len(self._open[i].prefix_tokens) for i in outputs}
        found = original(self, outputs, version)
        return {i: replace(c, token_ids=c.token_ids[before[i] :]) for i, c in found.items()}

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


def _one_position(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(metadata: Any, counts: Any) -> Any:
        found, before = original(metadata, counts), metadata.generators.positions
        rows = [p for p, n in zip(before.tolist(), counts, strict=True) for _ in range(n)]
        found.generators = replace(found.generators, positions=before.new_tensor(rows))
        return found

    return changed


ENGINE = (
    Fault("a-draft-is-kept-beyond-its-first-wrong-token",
          "mindspeed_rl.engines.vllm.patches.verified_drafts:kept_places", _each_alone,
          "tests/unit/engines/test_drafting.py::"
          "test_a_draft_is_kept_up_to_the_first_token_that_is_not_sampled",
          "Tokens would be sampled after tokens that the response does not have."),
    Fault("one-noise-for-all-tokens-of-a-draft",
          "mindspeed_rl.engines.vllm.patches.verified_drafts:per_row", _one_position,
          "tests/unit/engines/test_drafting.py::"
          "test_each_row_has_the_seed_of_its_request_and_a_position_of_its_own",
          "Drafts would change which tokens are sampled, and repeat those that repeat."),
    Fault("prefix-cache-survives-an-update",
          "mindspeed_rl.engines.vllm.engine:VllmEngine.finish_update",
          without("_reset_prefix_cache"), _ENGINE + "test_no_cached_prefix_survives_an_update",
          "Prompts seen before would be continued from keys and values of older weights."),
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
          "mindspeed_rl.engines.vllm.requests:OpenRequests.finish",
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
