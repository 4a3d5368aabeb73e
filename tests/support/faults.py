"""Named faults, each with the test that must turn red: ``tests/mutations.py`` plants them."""

from __future__ import annotations

from support.faults_algorithms import ALGORITHM_MUTATIONS
from support.faults_ascend import ASCEND_MUTATIONS
from support.faults_ascend_engine import ASCEND_ENGINE_MUTATIONS
from support.faults_conversion import CONVERSION_MUTATIONS
from support.faults_layouts import LAYOUT_MUTATIONS
from support.faults_memory import MEMORY_MUTATIONS
from support.faults_models import MODEL_MUTATIONS
from support.faults_ray import RAY_MUTATIONS
from support.faults_rewards import REWARD_MUTATIONS
from support.faults_rl import RL_MUTATIONS
from support.faults_rollout import ROLLOUT_MUTATIONS
from support.faults_tools import TOOL_MUTATIONS
from support.mutation import Mutation

__all__ = ["MUTATIONS", "Mutation"]

_SOURCES = "tests/simulated/test_sources.py::"
_SCHEDULE = "tests/simulated/test_schedule.py::"
_PLANNER = "tests/simulated/test_planner.py::"
_COSTS = "tests/simulated/test_sync_costs.py::"
_ARRIVES = _PLANNER + "test_every_element_arrives_where_vllm_keeps_it"
_CHECKSUMS = "tests/simulated/test_checksums.py::"
_ENGINE = "tests/unit/test_vllm_engine.py::"
_PARITY = "tests/distributed/test_parity.py::"
_TRAINING = "tests/distributed/test_training.py::"
_PACKED_ROW = "tests/unit/test_packing.py::test_a_packed_row_by_definition"

MUTATIONS = (
    Mutation(
        "gqa-split-as-thirds",
        "models/attention_rules.py",
        'yield "k", group * head, base + q_rows, head',
        'yield "k", group * head, spec.q_size + group * head, head',
        _ARRIVES,
    ),
    Mutation(
        "gate-and-up-swapped-in-the-engine",
        "models/rules.py",
        'for offset, part in ((0, "gate"), (round_up(size, share.multiple), "up")):',
        "for offset, part in zip(\n"
        '            (0, size) if "linear_fc1" in self.param else (size, 0), ("gate", "up")\n'
        "        ):",
        _ARRIVES,
    ),
    Mutation(
        # cancels out between trainer and engine, so only files show it
        "gate-and-up-swapped-on-both-sides",
        "models/rules.py",
        'for offset, part in ((0, "gate"), (round_up(size, share.multiple), "up")):',
        'for offset, part in ((0, "up"), (round_up(size, share.multiple), "gate")):',
        _PLANNER + "test_export_puts_whole_tensors_on_the_writer",
    ),
    Mutation(
        "key-value-replica-of-the-wrong-head",
        "models/attention_rules.py",
        "return index // (count // spec.num_kv_heads), 1",
        "return index % spec.num_kv_heads, 1",
        _ARRIVES,
    ),
    Mutation(
        "vocabulary-padding-leaks",
        "models/rules.py",
        "size = min(size, spec.vocab_size - start)",
        "size = min(size, spec.vocab_size - start + 1)",
        "tests/unit/test_models.py::test_no_cut_reaches_into_the_padding",
    ),
    Mutation(
        "layers-of-a-stage-off-by-one",
        "parallel/stages.py",
        "return Place(position % self.pp, position // self.pp, layer - first)",
        "return Place(position % self.pp, position // self.pp, layer - first + (position > 0))",
        _PLANNER + "test_layouts_declare_what_megatron_and_vllm_hold",
    ),
    Mutation(
        "first-source-serves-all",
        "resharding/sources.py",
        "source[entering] = np.repeat(src, shares)",
        "source[entering] = src[0]",
        _SOURCES + "test_both_views_tell_the_same",
    ),
    Mutation(
        "sources-take-no-turns",
        "resharding/sources.py",
        "self._far_tie = (place - turn * far) % size",
        "self._far_tie = place",
        _SOURCES + "test_turns_share_what_does_not_divide",
    ),
    Mutation(
        "leg-2-reads-the-trainer",
        "resharding/planner.py",
        "piece = (dst if leg == 2 else cell).piece_of(rank)",
        "piece = cell.shards[0].piece",
        _PLANNER + "test_plans_of_all_ranks_fit_together",
    ),
    Mutation(
        "runs-of-one-rectangle-enter-a-node-each",
        "resharding/planner.py",
        "return [Cell.of(tuple(several)) for several in same.values()]",
        "return [Cell.of((shard,)) for several in same.values() for shard in several]",
        _COSTS + "test_with_a_relay_a_node_receives_its_floor",
    ),
    Mutation(
        "a-view-that-is-a-copy-is-filled",
        "resharding/exchange.py",
        "if shown.data_ptr() != memory.data_ptr():",
        "if shown.numel() != shown.numel():",
        _COSTS + "test_a_view_that_is_a_copy_is_refused",
    ),
    Mutation(
        "gaps-between-messages-are-sent",
        "resharding/transports.py",
        "assert message.data_ptr() == end,",
        "assert True,",
        _COSTS + "test_messages_with_gaps_between_them_are_no_buffer",
    ),
    Mutation(
        "plans-are-compared-at-every-sync",
        "resharding/executor.py",
        "        self._compared = True",
        "        self._compared = False",
        _COSTS + "test_collectives_follow_the_rounds_and_not_the_tensors",
    ),
    Mutation(
        "strided-memory-sent-as-if-it-were-one-run",
        "resharding/exchange.py",
        "if view.is_contiguous() and view.dtype is self._dtype:",
        "if view.dtype is self._dtype:",
        _PLANNER + "test_every_element_arrives_without_staging",
    ),
    Mutation(
        "experts-beside-themselves-are-forgotten",
        "resharding/exchange.py",
        "        copy_within(self._round.repeats, self._write, self._write)\n",
        "",
        _PLANNER + "test_an_expert_that_a_rank_keeps_twice_arrives_once[False]",
    ),
    Mutation(
        "mirror-counted-as-a-source",
        "resharding/planner.py",
        "for s in shards if not s.mirror]",
        "for s in shards if s.holders]",
        _PLANNER + "test_plans_of_all_ranks_fit_together",
    ),
    Mutation(
        "bucket-ignores-shards-on-one-rank",
        "resharding/schedule.py",
        "ranks.step] += load",
        "ranks.step] = load",
        _SCHEDULE + "test_no_rank_stages_more_than_the_budget",
    ),
    Mutation(
        "slices-are-taken-as-exact",
        "resharding/schedule.py",
        "self.cost.loads * (1 / self.parts + 1 / self.cost.narrowest)",
        "self.cost.loads / self.parts",
        _SCHEDULE + "test_no_rank_stages_more_than_the_budget",
    ),
    Mutation(
        "streamed-experts-queue-up",
        "resharding/schedule.py",
        "for column in zip_longest(*of_holders.values()):",
        "for column in of_holders.values():",
        _SCHEDULE + "test_experts_of_all_ranks_stream_side_by_side",
    ),
    Mutation(
        "stages-cost-alike",
        "resharding/layouts/base.py",
        "return pattern, self.lane_of(self._rows_of_patterns[pattern][0], layer)",
        "return pattern",
        _SCHEDULE + "test_tensors_of_one_class_are_placed_alike",
    ),
    Mutation(
        "stages-one-after-the-other",
        "resharding/schedule.py",
        "rounds, largest = _fill(list(lanes_of[dtype].values()), costs, bucket_bytes)",
        "rounds, largest = _fill([sum(lanes_of[dtype].values(), [])], costs, bucket_bytes)",
        _SCHEDULE + "test_all_stages_send_in_all_rounds",
    ),
    Mutation(
        "checksum-forgets-the-position",
        "resharding/checksums.py",
        "return (bits * _index_hash(box, shape, values.device)).sum()",
        "return bits.sum()",
        _CHECKSUMS + "test_a_fault_is_found_and_named",
    ),
    Mutation(
        "checksum-counts-local-positions",
        "resharding/checksums.py",
        "line = torch.arange(lo, lo + size,",
        "line = torch.arange(0, size,",
        _CHECKSUMS + "test_any_cut_of_a_tensor_sums_to_the_whole",
    ),
    Mutation(
        "tensor-parallel-sum-dropped",
        "trainer/logprobs.py",
        "(total * scale).sum(0)",
        "(total * scale)[0]",
        _PARITY + "test_selection_equals_full_softmax_on_two_ranks",
    ),
    Mutation(
        "tensor-parallel-maximum-dropped",
        "trainer/logprobs.py",
        "scale = shift.exp()",
        "scale = torch.ones_like(shift)",
        _PARITY + "test_selection_equals_full_softmax_on_two_ranks",
    ),
    Mutation(
        "picked-logit-of-another-rank",
        "trainer/logprobs.py",
        ".gather(0, holder[None])[0]",
        "[-1]",
        _PARITY + "test_selection_equals_full_softmax_on_two_ranks",
    ),
    Mutation(
        "temperature-forgotten-in-the-gradient",
        "trainer/logprobs.py",
        "grad = grad.div_(temperature).to(hidden.dtype)",
        "grad = grad.to(hidden.dtype)",
        _PARITY + "test_selection_equals_full_softmax_on_one_rank",
    ),
    Mutation(
        "targets-not-shifted",
        "data/packing.py",
        "token_ids.roll(-1)[:total]",
        "token_ids[:total]",
        _PACKED_ROW,
    ),
    Mutation(
        "mask-off-by-one",
        "data/packing.py",
        "(position >= (num_prompt - 1)[owner])",
        "(position >= num_prompt[owner])",
        _PACKED_ROW,
    ),
    Mutation(
        "target-crosses-into-the-next-sequence",
        "data/packing.py",
        "has_target = position < (real - 1 + goes_on)[owner]",
        "has_target = position < real[owner]",
        _PACKED_ROW,
    ),
    Mutation(
        "ranks-differ-in-micro-batches",
        "data/balance.py",
        "count = max(1, -(-len(best) // multiple)) * multiple",
        "count = max(1, len(best))",
        "tests/unit/test_packing.py::test_every_sample_is_planned_once",
    ),
    Mutation(
        "heaviest-parts-meet",
        "data/balance.py",
        "zip(first[2], reversed(second[2]), strict=True)",
        "zip(first[2], second[2], strict=True)",
        "tests/unit/test_balance.py::test_two_parts_are_close_to_the_best_of_equal_number",
    ),
    Mutation(
        "rows-take-what-does-not-fit",
        "data/balance.py",
        "place = bisect_left(room, (lengths[i], 0))",
        "place = bisect_left(room, (lengths[i] - 1, 0))",
        "tests/unit/test_balance.py::test_rows_hold_everything_once_and_are_nearly_the_fewest",
    ),
    Mutation(
        "sampler-repeats-after-a-resume",
        "data/sampler.py",
        'self._start_epoch(state["epoch"], state["position"])',
        'self._start_epoch(state["epoch"], max(0, state["position"] - 1))',
        "tests/unit/test_data_sampler.py::test_resume_anywhere_equals_uninterrupted",
    ),
    Mutation(
        "seed-depends-on-the-engine",
        "orchestration/rl_rollout.py",
        "request_seed(seed, step, i, attempt))",
        "request_seed(seed, step, i - share.start, attempt))",
        "tests/unit/test_rollout_requests.py::test_requests_do_not_depend_on_the_layout",
    ),
    Mutation(
        "seed-forgets-the-step",
        "rollout/engine.py",
        'struct.pack("<4q", run_seed, step, sample_id, k)',
        'struct.pack("<4q", run_seed, 0, sample_id, k)',
        "tests/unit/test_engine_requests.py::test_seeds_of_a_run_are_all_different",
    ),
    Mutation(
        "digest-forgets-the-weights",
        "rollout/engine.py",
        "repr((settings, version))",
        "repr(settings)",
        "tests/unit/test_engine_requests.py::test_any_difference_changes_the_digest",
    ),
    Mutation(
        "stale-prefix-cache",
        "rollout/vllm_engine.py",
        "        self._reset_prefix_cache()\n        self._updating = False\n",
        "        self._updating = False\n",
        _ENGINE + "test_no_cached_prefix_survives_an_update",
    ),
    Mutation(
        "weights-version-gate-removed",
        "rollout/vllm_engine.py",
        "if self._state is not EngineState.AWAKE or self._version != trainer_version:",
        "if self._state is not EngineState.AWAKE:",
        _ENGINE + "test_weights_of_another_version_do_not_generate",
    ),
    Mutation(
        "half-an-update-generates",
        "rollout/vllm_engine.py",
        "        self._version = -1\n        self._derived.begin()\n",
        "        self._derived.begin()\n",
        _ENGINE + "test_half_written_weights_do_not_generate",
    ),
    Mutation(
        "raising-reward-counts-as-0",
        "rewards/scoring.py",
        'return RewardResult(request.sample_id, None, parts, "error", detail)',
        'return RewardResult(request.sample_id, 0.0, parts, "ok", detail)',
        "tests/unit/test_rewards_pool.py::test_raising_reward_is_counted_and_above_the_limit_raises",
    ),
    Mutation(
        "nan-reward-accepted",
        "rewards/scoring.py",
        "isinstance(value, numbers.Real) and math.isfinite(value)",
        "isinstance(value, numbers.Real)",
        "tests/unit/test_rewards_pool.py::test_nonsense_values_are_errors",
    ),
    Mutation(
        "patch-of-a-changed-target",
        "patching.py",
        "if found != patch.parameters:",
        "if len(found) < len(patch.parameters):",
        "tests/unit/test_patching.py::test_a_changed_signature_is_refused",
    ),
    Mutation(
        "contradicting-architecture-flag-ignored",
        "config/architecture.py",
        '("--rotary-base", model.rotary_base, spec.rope.theta)',
        '("--rotary-base", None, spec.rope.theta)',
        "tests/unit/test_config_validate.py::test_a_contradicting_architecture_flag_is_refused",
    ),
    Mutation(
        "longer-positions-than-the-model-accepted",
        "config/architecture.py",
        "longest > spec.max_position_embeddings:",
        "longest > 2 * spec.max_position_embeddings:",
        "tests/unit/test_config_validate.py::test_a_contradicting_architecture_flag_is_refused",
    ),
    Mutation(
        "inert-flags-not-listed",
        "arguments.py",
        "if name in flags and flags[name].info.inert",
        "if name in flags and not flags[name].info.help",
        "tests/unit/test_flag_use.py::test_flags_that_do_nothing_are_listed",
    ),
    Mutation(
        "torch-imported-by-the-layouts",
        "resharding/boxes.py",
        "from math import prod\n",
        "from math import prod\n\nimport torch  # noqa: F401\n",
        "tests/test_import_rules.py::test_imports_follow_the_layers",
    ),
    Mutation(
        "loss-mean-of-each-micro-batch",
        "algorithms/aggregation.py",
        "return ones / max(1, denominators.tokens)",
        "return ones / max(1, ones.numel())",
        _TRAINING + "test_gradients_follow_the_norm_rule[tp1]",
    ),
    Mutation(
        "tensor-parallel-gradient-not-summed",
        "trainer/heads.py",
        "rows = copy_to_tensor_model_parallel_region(rows)",
        "rows = rows * 1",
        _TRAINING + "test_gradients_follow_the_norm_rule[tp2]",
    ),
    Mutation(
        "shards-not-marked-in-the-gradient-norm",
        "trainer/model.py",
        "    mark_tensor_parallel_shards(model)\n    check",
        "    check",
        _TRAINING + "test_three_updates_equal_those_of_one_rank[tp2-pp2-grpo-steps]",
    ),
    Mutation(
        "padded-vocabulary-has-probability",
        "trainer/logprobs.py",
        "end = max(start, min(start + weight.size(0), vocab_size))",
        "end = start + weight.size(0)",
        _PARITY + "test_selection_equals_full_softmax_on_one_rank",
    ),
    *LAYOUT_MUTATIONS,
    *CONVERSION_MUTATIONS,
    *RL_MUTATIONS,
    *ROLLOUT_MUTATIONS,
    *TOOL_MUTATIONS,
    *ASCEND_ENGINE_MUTATIONS,
    *ALGORITHM_MUTATIONS,
    *ASCEND_MUTATIONS,
    *MODEL_MUTATIONS,
    *MEMORY_MUTATIONS,
    *RAY_MUTATIONS,
    *REWARD_MUTATIONS,
)
