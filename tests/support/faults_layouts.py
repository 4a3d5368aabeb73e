"""Named faults of weight tables, layouts of experts and pipelines, and check_mapping."""

from __future__ import annotations

from support.mutation import Mutation

_PLANNER = "tests/simulated/test_planner.py::"
_SOURCES = "tests/simulated/test_sources.py::"
_ARRIVES = _PLANNER + "test_every_element_arrives_where_vllm_keeps_it"
_DECLARED = _PLANNER + "test_layouts_declare_what_megatron_and_vllm_hold"

LAYOUT_MUTATIONS = (
    Mutation(
        "matrices-of-few-layers-travel-whole",
        "resharding/sources.py",
        "count = _num_slices(_shares(direct), alike)",
        "count = 1",
        _SOURCES + "test_few_turns_are_made_up_for_by_slices",
    ),
    Mutation(
        "what-holders-send-already-is-forgotten",
        "resharding/sources.py",
        "self._load = self._load + loads * size",
        "self._load = self._load * size",
        _SOURCES + "test_what_must_come_from_one_source_spares_it_elsewhere",
    ),
    Mutation(
        "chunks-of-a-stage-in-a-row",
        "parallel/stages.py",
        "return Place(position % self.pp, position // self.pp, layer - first)",
        "return Place(position // self.vpp, position % self.vpp, layer - first)",
        _DECLARED,
    ),
    Mutation(
        "empty-slot-removes-the-next-layer",
        "parallel/stages.py",
        "if slot not in empty)",
        "if slot - 1 not in empty)",
        _DECLARED,
    ),
    Mutation(
        "the-last-chunk-has-no-layer-less-for-the-loss",
        "parallel/stages.py",
        "    counts[-1] -= loss\n",
        "    counts[0] -= loss\n",
        "tests/unit/test_pipeline_split.py::test_layers_of_every_chunk_are_megatrons",
    ),
    Mutation(
        "expert-parallelism-innermost",
        "parallel/layout.py",
        "range(first + etp + self.etp * ep,",
        "range(first + ep + self.ep * etp,",
        _ARRIVES,
    ),
    Mutation(
        "experts-dealt-out-in-turn",
        "resharding/layouts/megatron.py",
        "ep, local = divmod(expert, per_rank)",
        "local, ep = divmod(expert, parallel.ep)",
        _ARRIVES,
    ),
    Mutation(
        "padding-of-gate-between-up",
        "models/rules.py",
        '(round_up(size, share.multiple), "up")):',
        '(size, "up")):',
        _ARRIVES,
    ),
    Mutation(
        "transposed-experts-written-straight",
        "resharding/boxes.py",
        "return shown.swapaxes(-1, -2) if self.transposed else shown",
        "return shown.reshape(shown.shape[::-1]) if self.transposed else shown",
        _ARRIVES,
    ),
    Mutation(
        "both-directions-share-a-link",
        "resharding/sync_metrics.py",
        "max(received, sent) / seconds",
        "(received + sent) / seconds",
        "tests/unit/test_sync_metrics.py::test_the_busier_direction_sets_the_speed",
    ),
    Mutation(
        "true-taken-for-a-number",
        "models/config_values.py",
        "isinstance(value, int) and not isinstance(value, bool) and value >= 0",
        "isinstance(value, int)",
        "tests/unit/test_models.py::test_values_of_wrong_types_are_refused",
    ),
    Mutation(
        "runs-of-a-group-begin-at-its-head",
        "models/attention_rules.py",
        "part, hf_row + low - start, low - first, high - low)",
        "part, hf_row, low - first, high - low)",
        _ARRIVES,
    ),
    Mutation(
        "shared-experts-always-cut",
        "resharding/layouts/vllm.py",
        "Share() if whole else Share(tp, engine.tp, multiple=multiple)",
        "Share(tp, engine.tp, multiple=multiple)",
        _DECLARED,
    ),
    Mutation(
        "fused-latent-projections-swapped",
        "models/blocks.py",
        'parts=((_Q_A, "q_lora_rank"), (_KV_A, "kv_a_size")),',
        'parts=((_KV_A, "kv_a_size"), (_Q_A, "q_lora_rank")),',
        _ARRIVES,
    ),
    Mutation(
        "router-bias-travels-in-bf16",
        "resharding/executor.py",
        "dtype = wire_dtype(part.dtype, self._dtype)",
        "dtype = self._dtype",
        "tests/simulated/test_checkpoint_round_trip.py::test_a_checkpoint_comes_back_bit_for_bit",
    ),
    Mutation(
        "only-gate-of-an-expert-counted",
        "models/expert_rules.py",
        "        return self.matrix.hf_shapes(spec)",
        "        return dict(list(self.matrix.hf_shapes(spec).items())[:1])",
        "tests/unit/test_published_models.py::test_totals_follow_from_the_config_alone",
    ),
    Mutation(
        "check-mapping-blind-to-overlaps",
        "checkpoint/mapping.py",
        "if both := box.intersect(other):",
        "if both := None:",
        "tests/unit/test_mapping.py::test_a_wrong_row_is_found",
    ),
)
