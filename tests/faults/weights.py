"""Wrong weights: cut, moved, reduced or compared wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from faults.planting import Fault, gives, returns, skipped, takes, then

_PLANNER = "tests/simulated/test_planner.py::"
_ARRIVES = _PLANNER + "test_every_element_arrives_where_vllm_keeps_it"
_RUNS = _PLANNER + "test_experts_of_a_run_arrive_together"
_TURNS = "tests/simulated/test_turns.py::test_a_pair_of_ranks_exchanges_once_in_a_group_of_rounds"
_ONE_RANK = "tests/distributed/test_parity.py::test_selection_equals_full_softmax_on_one_rank"
_TWO_RANKS = "tests/distributed/test_parity.py::test_selection_equals_full_softmax_on_two_ranks"
_TRAINING = "tests/distributed/test_training.py::"
_HEAD = "tests/unit/trainer/test_head_gradient.py::"
_CHECKSUMS = "tests/simulated/test_checksums.py::"
_HANDOVER = "tests/simulated/test_handover.py::test_gather_and_sync_are_at_the_floor_of_both"
_PHASES = "tests/unit/colocation/test_scheduler.py::"
_CODEC = "tests/unit/deltas/test_codec.py::"
_DELTAS = "tests/simulated/test_deltas.py::"


def _only_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copies that are made at the first sync and never renewed."""
    return lambda self, read: None if self.params else original(self, read)


def _as_thirds(runs: Iterator[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    """Queries, keys and values below each other in place of group by group."""
    rows = list(runs)
    size = {part: sum(r[3] for r in rows if r[0] == part) for part in "qkv"}
    first = {"q": 0, "k": size["q"], "v": size["q"] + size["k"]}
    return [(part, hf_row, first[part] + hf_row, count) for part, hf_row, _, count in rows]


def _other_head(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, num_kv_heads: int, index: int, count: int) -> Any:
        few = count <= num_kv_heads
        return original(self, num_kv_heads, index, count) if few else (index % num_kv_heads, 1)

    return changed


def _swapped_halves(cuts: Iterator[Any]) -> list[Any]:
    gate, up = cuts
    return [replace(gate, hf_name=up.hf_name), replace(up, hf_name=gate.hf_name)]


def _swapped_in_the_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, *args: Any) -> Any:
        cuts = original(self, *args)
        return cuts if "linear_fc1" in self.param else _swapped_halves(cuts)

    return changed


def _first_ranks_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(stats: Any, holder: Any) -> Any:
        top, sums = original(stats, holder)
        sums[0] = stats[0, 1] * (stats[0, 0] - top).exp()
        return top, sums

    return changed


def _matrices_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, box: Any) -> int:
        return int(original(self, box)) if len(box.size) > 1 or self.every == 1 else 0

    return changed


def _not_from_itself(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda transfers, read, write: 0 if read is write else original(transfers, read, write)


def _without_waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any) -> None:
        platform = self._platform
        platform.wait_for_copies = lambda: None
        try:
            original(self)
        finally:
            del platform.wait_for_copies

    return changed


def _any_version(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, engine: Any, version: int) -> None:
        if engine.weights_version < 0:
            original(self, engine, version)

    return changed


def _moved_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, engine: Any, version: int) -> None:
        moves, move = [0], self._move

        def once(*args: Any) -> None:
            if moves:
                moves.pop()
                move(*args)

        self._move = once
        try:
            original(self, engine, version)
        finally:
            del self._move

    return changed


def _seed_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(layout: Any, rank: int, params: Any, seed: int) -> None:
        original(layout, rank, params, seed + rank)

    return changed


WEIGHTS = (
    Fault("grouped-queries-split-as-thirds", "mindspeed_rl.models.attention_rules:GroupedQKV._runs",
          gives(_as_thirds), _ARRIVES,
          "Heads of the engine would hold rows of other heads; shapes fit."),
    Fault("key-value-replica-of-the-wrong-head",
          "mindspeed_rl.models.attention_rules:StackedQKV._kv",
          _other_head, _ARRIVES,
          "With more ranks than key/value heads a rank would attend to another head."),
    Fault("gate-and-up-swapped-in-the-engine", "mindspeed_rl.models.rules:GateUp.cuts",
          _swapped_in_the_engine, _ARRIVES,
          "Both halves have one shape, so nothing but the numbers shows it."),
    Fault("gate-and-up-swapped-on-both-sides", "mindspeed_rl.models.rules:GateUp.cuts",
          gives(_swapped_halves), _PLANNER + "test_export_puts_whole_tensors_on_the_writer",
          "It cancels out between trainer and engine; only files would be wrong."),
    Fault("layers-of-later-stages-off-by-one", "mindspeed_rl.core.stages:StageLayout.place_of",
          gives(lambda place: place._replace(local=place.local + (place.stage > 0))),
          _PLANNER + "test_layouts_declare_what_megatron_and_vllm_hold",
          "Layers of a pipeline stage would be taken for their neighbours."),
    Fault("experts-kept-twice-are-forgotten", "mindspeed_rl.weights.exchange:copy_within",
          _not_from_itself, _PLANNER + "test_an_expert_that_a_rank_keeps_twice_arrives_once[False]",
          "The second copy of an expert would keep the weights of an earlier step."),
    Fault("experts-of-all-layers-in-the-same-places",
          "mindspeed_rl.weight_layouts.rollout:RolloutLayout.experts_at",
          lambda original: lambda self, layer: self._everywhere, _ARRIVES,
          "Experts of layers that place them otherwise would be written over each other."),
    Fault("experts-of-a-run-take-the-place-of-its-first",
          "mindspeed_rl.core.boxes:ParamView.shifted",
          takes(places=lambda _: 0), _RUNS + "[False-sliced]",
          "Experts of one rank would be written over those of another."),
    Fault("experts-of-a-run-in-reverse", "mindspeed_rl.core.boxes:ParamView.of_run",
          gives(lambda shown: shown.flip(0)), _RUNS + "[False-sliced]",
          "The engine would compute with other experts than its routers choose."),
    Fault("experts-of-a-run-read-from-its-first-parameter",
          "mindspeed_rl.weight_layouts.base:TableLayout.param_like",
          lambda original: lambda self, piece, hf_name: piece.param, _RUNS + "[False-sliced]",
          "All experts of a rank would have the weights of its first one."),
    Fault("runs-ignore-where-the-engine-has-its-experts",
          "mindspeed_rl.weight_layouts.rollout:RolloutLayout.expert_run",
          lambda original: lambda self, layer, expert: range(self.spec.num_experts),
          _RUNS + "[False-moved]",
          "Experts that are placed by their load would be sent as if they were in order."),
    Fault("one-expert-of-a-run-is-counted", "mindspeed_rl.handover.joint:_runs",
          gives(lambda runs: [(name, 1) for name, _ in runs]), _HANDOVER,
          "A dry run would promise a weight update of a fraction of its bytes."),
    Fault("padding-of-the-vocabulary-is-needed", "mindspeed_rl.handover.buffers:buffers_of",
          gives(lambda buffers: [replace(buffer, filler=0) for buffer in buffers]), _HANDOVER,
          "The floor would contain bytes that nobody needs."),
    Fault("all-take-the-first-turn", "mindspeed_rl.weights.schedule:turn_of",
          returns(0), _TURNS,
          "A round would carry what all turns together may, and exceed the staging memory."),
    Fault("experts-everywhere-are-relayed",
          "mindspeed_rl.config.rollout:RolloutConfig.relays",
          takes(experts_everywhere=lambda _: False),
          "tests/simulated/test_floor.py::test_engines_that_cut_all_experts_have_no_relay",
          "A weight update would take hundreds of thousands of messages per rank."),
    Fault("turns-are-taken-for-half-as-busy", "mindspeed_rl.weights.turns:Demand.loads",
          gives(lambda loads: loads / 2), _TURNS,
          "Rounds would exceed the memory that --reshard-bucket-mb allows."),
    Fault("ranks-never-take-turns", "mindspeed_rl.weights.turns:choose_turns",
          takes(most=lambda _: 10**9),
          "tests/simulated/test_turns.py::test_turns_make_few_messages_of_the_same_bytes",
          "Engines that cut their experts would take tens of thousands of messages per rank."),
    Fault("turns-by-the-last-digit", "mindspeed_rl.weights.turns:digit_sum",
          lambda original: lambda number, base: number % base,
          "tests/simulated/test_turns.py::test_digits_are_summed",
          "Destinations of one sender would share a turn, while others wait."),
    Fault("first-of-some-transposed-experts-not-copied", "mindspeed_rl.weights.exchange:_matrices",
          gives(lambda pairs: list(pairs)[1:] or pairs), _RUNS + "[False-sliced]",
          "An engine for NPUs would compute with an expert of an earlier step."),
    Fault("layers-are-not-told-where-experts-went", "mindspeed_rl.weights.sync:WeightSync.retarget",
          takes(layer_experts=lambda _: ()),
          "tests/unit/weights/test_retarget.py::test_experts_are_placed_before_their_weights_come",
          "The engine would compute with other experts than its routers choose."),
    Fault("router-bias-travels-in-the-models-precision",
          "mindspeed_rl.weights.executor:wire_dtype",
          lambda original: lambda declared, default: default,
          "tests/simulated/test_checkpoint_round_trip.py::test_a_checkpoint_comes_back_bit_for_bit",
          "Small differences of router biases decide which experts compute."),
    Fault("plans-of-ranks-not-compared",
          "mindspeed_rl.weights.executor:Resharder.compare_plans",
          skipped,
          "tests/simulated/test_plan_agreement.py::"
          "test_ranks_with_another_plan_are_named_on_all_ranks[0-precision]",
          "Ranks that planned from other flags would mix up tensors, or hang."),
    Fault("checksum-forgets-the-position", "mindspeed_rl.proof.checksums:_column_weights",
          gives(lambda weights: weights * 0 + 1), _CHECKSUMS +
          "test_changes_that_cancel_out_in_a_shorter_sum_are_found",
          "Weights in the wrong order would be proven equal."),
    Fault("checksum-forgets-the-row", "mindspeed_rl.proof.checksums:_row_weights",
          gives(lambda weights: weights * 0 + 1), _CHECKSUMS +
          "test_changes_that_cancel_out_in_a_shorter_sum_are_found",
          "Rows of a matrix in the wrong order would be proven equal."),
    Fault("checksum-loses-pairs-of-signs", "mindspeed_rl.proof.checksums:_sum_digits",
          then(lambda digits, weights, out: out.bitwise_and_(0xFFFF)), _CHECKSUMS +
          "test_changes_that_cancel_out_in_a_shorter_sum_are_found",
          "A tensor with every sign turned would be proven equal."),
    Fault("checksum-forgets-where-a-piece-begins", "mindspeed_rl.proof.checksums:_column_weights",
          takes(first=lambda _: 0), _CHECKSUMS + "test_any_cut_of_a_tensor_sums_to_the_whole",
          "A piece in the place of its neighbour would be proven equal, and other cuts unequal."),
    Fault("weights-of-the-checksum-repeat", "mindspeed_rl.proof.checksums:splitmix64",
          takes(numbers=lambda numbers: numbers % 64),
          "tests/simulated/test_checksum_misses.py::"
          "test_two_signs_are_missed_as_often_as_is_stated",
          "Columns that are 64 apart could be swapped without being noticed."),
    Fault("sample-counts-from-the-first-row-of-a-piece",
          "mindspeed_rl.proof.checksums:RowSample.within",
          takes(box=lambda box: replace(box, lo=(0,) * len(box.lo))),
          _CHECKSUMS + "test_any_cut_of_a_tensor_sums_to_the_whole",
          "Trainer and engine would sum other rows, and sound weights would end the run."),
    Fault("experts-of-a-run-are-summed-from-the-second-on",
          "mindspeed_rl.weights.verify:_HeldPiece.shown",
          gives(lambda shown: shown.roll(1, 0) if shown.ndim == 3 else shown),
          _CHECKSUMS + "test_experts_that_are_summed_together_are_named_one_by_one",
          "Sound experts would end the run, and wrong ones would have another's name."),
    Fault("one-expert-of-a-run-is-proven", "mindspeed_rl.proof.checksums:fold_rows",
          gives(lambda found: found[[0] * len(found)] if found.ndim == 2 else found),
          _CHECKSUMS + "test_matrices_together_have_the_checksums_of_each",
          "An expert could be wrong for the whole run, unless it is the first of its rank."),
    Fault("samples-have-the-same-rows", "mindspeed_rl.weights.verify:sampled_rows",
          takes(sample=lambda _: 0),
          _CHECKSUMS + "test_a_sample_finds_what_is_wrong_in_its_rows_alone",
          "Rows that no sample has would be wrong until the next full proof."),
    Fault("sample-leaves-vectors-out", "mindspeed_rl.proof.checksums:RowSample.count",
          _matrices_alone,
          _CHECKSUMS + "test_a_sample_finds_what_is_wrong_in_its_rows_alone",
          "Norms and biases would be wrong until the next full proof."),
    Fault("last-rank-of-a-group-is-not-added", "mindspeed_rl.parallel.two_levels:_add",
          takes(peers=lambda peers: list(peers)[:-1]),
          "tests/unit/parallel/test_two_levels.py::test_every_rank_ends_with_the_sum[9-4-shape2]",
          "In worlds of more than 1,000 ranks sound weights would end the run."),
    Fault("an-engine-that-restarted-is-not-noticed",
          "mindspeed_rl.weights.sync:unexpected_versions", returns(""),
          "tests/unit/weights/test_proofs.py::"
          "test_unexpected_engines_get_all_weights_with_a_full_proof",
          "An engine that restarted alone would be proven by a few rows, without a line."),
    Fault("loaded-weights-are-proven-by-a-sample",
          "mindspeed_rl.weights.sync:WeightSync.weights_replaced", skipped,
          "tests/unit/rl/test_rollback.py::"
          "test_the_weights_of_a_checkpoint_are_proven_in_full",
          "After a load an engine could keep rows of the weights before it."),
    Fault("memory-is-freed-before-its-copy-is-done",
          "mindspeed_rl.colocation.storage_group:StorageGroup.release", _without_waiting,
          _PHASES + "test_nothing_is_read_or_given_back_before_its_copy_is_done",
          "The optimizer would go on with what the weight sync wrote over its state."),
    Fault("late-memory-never-leaves",
          "mindspeed_rl.colocation.scheduler:DeviceScheduler._sync_to_rollout",
          gives(lambda actions: [a for a in actions if a.name != "offload optimizer"]),
          _PHASES + "test_the_optimizer_leaves_beside_the_sync_where_it_is_late",
          "The engine's cache would be allocated beside the optimizer state."),
    Fault("differences-of-words-do-not-wrap", "mindspeed_rl.deltas.codec:_wrapped",
          lambda original: lambda numbers, dtype: numbers.clamp(
              -(1 << 8 * dtype.itemsize - 1), (1 << 8 * dtype.itemsize - 1) - 1),
          _CODEC + "test_all_pairs_of_odd_words",
          "A weight that changes its sign across zero would become another number."),
    Fault("changed-words-counted-from-one", "mindspeed_rl.deltas.codec:_positions",
          gives(lambda where: (where - 1).clamp(min=0)),
          _CODEC + "test_every_bit_pattern_comes_back",
          "Every change would be applied to the weight before the one that changed."),
    Fault("far-moves-cut-by-their-first-bit", "mindspeed_rl.deltas.codec:_from_widths",
          gives(lambda numbers: numbers >> 1), _CODEC + "test_every_bit_pattern_comes_back",
          "Weights that move by more than one would arrive wrong."),
    Fault("gaps-are-coded-without-low-bits", "mindspeed_rl.deltas.codec:_best_shift",
          returns(0), _CODEC + "test_bytes_are_within_1_15_of_the_entropy",
          "Every weight would cost a bit, however few change."),
    Fault("changes-are-sent-to-an-engine-of-another-version", "mindspeed_rl.deltas.path:_same",
          returns(True),
          _DELTAS + "test_a_receiver_without_the_version_gets_all_of_its_weights",
          "An engine that restarted would add changes to weights that it does not have."),
    Fault("changes-are-sent-to-an-engine-that-lost-its-bits",
          "mindspeed_rl.deltas.path:DeltaResharder.agree", takes(keeps_bits=lambda _: True),
          _DELTAS + "test_a_receiver_without_the_version_gets_all_of_its_weights",
          "Changes would be added to zeros in engines that keep experts in another order."),
    Fault("lost-changes-are-not-followed-by-all-weights",
          "mindspeed_rl.weights.sync:WeightSync.run", _moved_once,
          "tests/unit/weights/test_changes.py::test_all_weights_follow_a_delta_that_was_lost",
          "One lost message would end a run that could have gone on."),
    Fault("copies-of-what-was-sent-grow-old", "mindspeed_rl.deltas.path:SentWeights.update",
          _only_once, _DELTAS + "test_changes_leave_what_whole_weights_would",
          "Changes would be applied again at every sync."),
    Fault("heads-travel-without-a-checksum", "mindspeed_rl.deltas.codec:_crc", returns(0),
          _CODEC + "test_a_head_of_which_any_bit_changed_on_its_way_is_refused",
          "A rank would wait for a message of another size than was sent."),
    Fault("damage-stays-on-the-rank-that-met-it",
          "mindspeed_rl.deltas.path:DeltaResharder._any_damaged", returns(False),
          _DELTAS + "test_damage_on_one_rank_brings_all_weights_to_all",
          "An engine would go on with the weights before the update in part."),
    Fault("messages-are-never-coded", "mindspeed_rl.deltas.messages:is_coded",
          returns(False), _DELTAS + "test_bytes_follow_what_changed",
          "All weights would travel, as if --reshard-deltas had not been given."),
    Fault("weights-that-stay-wrong-pass", "mindspeed_rl.weights.sync:WeightSync._refuse",
          skipped, "tests/unit/weights/test_changes.py::"
          "test_weights_that_differ_after_all_moved_end_the_run",
          "The engine would sample from weights of which the proof said that they are wrong."),
    Fault("step-hides-more-than-it-takes", "mindspeed_rl.handover.hiding:hiding",
          takes(bf16=lambda bf16: not bf16),
          "tests/unit/handover/test_hiding.py::"
          "test_the_step_is_bound_by_memory_and_hides_no_more_than_the_shorter",
          "The dry run would promise seconds that no overlap can save."),
    Fault("optimizer-stays-where-one-byte-is-missing",
          "mindspeed_rl.handover.offload:order_of_offload",
          takes(usable_bytes=lambda usable: usable + 1),
          "tests/unit/planning/test_budget.py::"
          "test_the_optimizer_leaves_beside_the_update_where_both_fit",
          "Weight updates would end for lack of memory that the dry run had promised."),
    Fault("syncs-are-not-proven", "mindspeed_rl.weights.sync:WeightSync._differing",
          returns([]), _PHASES + "test_weights_that_differ_are_never_generated_from",
          "The engine would sample from weights that differ from the trainer's."),
    Fault("engine-keeps-the-weights-of-an-earlier-update",
          "mindspeed_rl.weights.sync:WeightSync.run",
          _any_version, _PHASES + "test_weights_move_only_when_their_version_changed",
          "Every step after the first would sample from stale weights."),
    Fault("tensor-parallel-sum-dropped", "mindspeed_rl.trainer.logprobs:_combined",
          _first_ranks_sum, _TWO_RANKS,
          "Log-probs would be over a part of the vocabulary."),
    Fault("logits-not-divided-by-the-temperature", "mindspeed_rl.trainer.logprobs:_logits",
          takes(temperature=lambda _: 1.0), _ONE_RANK,
          "The trainer's distribution would not be the one that was sampled from."),
    Fault("padded-vocabulary-has-probability", "mindspeed_rl.trainer.logprobs:selected_logprobs",
          takes(vocab_size=lambda _: 1 << 30), _ONE_RANK,
          "Rows that no token has would take probability from all others."),
    Fault("gradient-of-the-output-projection-added-twice",
          "mindspeed_rl.trainer.weight_gradient:WeightGradient.end",
          lambda original: lambda self, weight, total: total.clone(),
          _HEAD + "test_the_buffer_gets_the_gradient_of_every_micro_batch_once",
          "What is in the buffer already would be added to it by the hook as well."),
    Fault("gradient-of-the-output-projection-lost",
          "mindspeed_rl.trainer.weight_gradient:WeightGradient.begin",
          gives(lambda total: total.clone()),
          _HEAD + "test_the_buffer_gets_the_gradient_of_every_micro_batch_once",
          "The output projection would learn nothing: its gradient is in no buffer."),
    Fault("gradient-of-a-tied-embedding-lost",
          "mindspeed_rl.trainer.weight_gradient:WeightGradient.end",
          then(lambda self, weight, total: (
              setattr(weight, "grad_added_to_main_grad", True),
              setattr(weight, "zero_out_wgrad", False))),
          _HEAD + "test_the_buffer_gets_the_gradient_of_every_micro_batch_once",
          "The hook would take the embedding's gradient for one that is in the buffer."),
    Fault("blocks-of-ids-not-joined", "mindspeed_rl.trainer.logprobs:_statistics",
          takes(rows=lambda rows: rows[:32]),
          _HEAD + "test_the_buffer_gets_the_gradient_of_every_micro_batch_once",
          "Log-probs would be over the first block of the vocabulary."),
    Fault("tensor-parallel-gradient-not-summed",
          "mindspeed_rl.trainer.heads:copy_to_tensor_model_parallel_region",
          lambda original: lambda rows: rows * 1,
          _TRAINING + "test_gradients_follow_the_norm_rule[tp2]",
          "Each rank would train the body on its part of the vocabulary alone."),
    Fault("norm-of-sequence-parallel-ranks-not-summed",
          "mindspeed_rl.trainer.norm:RMSNorm.__init__",
          then(lambda self, *_, **__: setattr(self.weight, "sequence_parallel", False)),
          _TRAINING + "test_gradients_follow_the_norm_rule[tp2]",
          "The gradient of a norm's weight would be that of a part of every sequence."),
    Fault("shards-counted-once-in-the-gradient-norm",
          "mindspeed_rl.trainer.model:mark_tensor_parallel_shards",
          skipped, _TRAINING + "test_three_updates_equal_those_of_one_rank[tp2-pp2-grpo-steps]",
          "Clipping would follow the norm of the first rank's shards."),
    Fault("damaged-checkpoint-taken-for-whole", "mindspeed_rl.checkpoint.resume:damage_of",
          returns(""),
          "tests/unit/checkpoint/test_resume.py::test_damaged_checkpoint_is_passed_over_and_told",
          "A run would resume from a folder that was copied in part."),
    Fault("renamed-checkpoint-taken-for-its-name", "mindspeed_rl.checkpoint.resume:_other_step",
          returns(""),
          "tests/unit/checkpoint/test_resume.py::test_damaged_checkpoint_is_passed_over_and_told",
          "A run would go on at another step than the one that it seems to be at."),
    Fault("changed-bytes-of-a-checkpoint-not-found", "mindspeed_rl.checkpoint.checksums:compare",
          returns([]),
          "tests/unit/checkpoint/test_checksums.py::test_a_changed_file_is_named_with_both_checksums",
          "A flipped bit in weights or moments would change every number of a resumed run."),
    Fault("infinite-values-taken-for-weights", "mindspeed_rl.checkpoint.hf:problem_of",
          returns(""),
          "tests/unit/checkpoint/test_hf.py::test_weights_that_cannot_be_are_named_with_their_file",
          "A run would blame the engine, or fail at its first update."),
    Fault("random-weights-differ-by-rank", "mindspeed_rl.checkpoint.random_weights:draw_weights",
          _seed_of_its_own,
          "tests/unit/checkpoint/test_random_weights.py::test_every_layout_has_the_same_weights",
          "Replicas of a throughput run would train different models."),
)  # fmt: skip
