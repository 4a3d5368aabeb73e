"""Faults of the memory model, of offload and ledger."""

from __future__ import annotations

from support.mutation import Mutation

_MODEL = "tests/unit/test_memory_model.py::"
_PHASES = "tests/unit/test_memory_phases.py::"
_OFFLOAD = "tests/unit/test_offload.py::"
_LEDGER = "tests/unit/test_memory_ledger.py::"
_REAL = "tests/distributed/test_memory_prediction.py::test_the_largest_moment_of_a_step"

MEMORY_MUTATIONS = (
    Mutation(
        "one-moment-of-adam",
        "memory/model_state.py",
        "MOMENTS = 2",
        "MOMENTS = 1",
        _MODEL + "test_state_of_one_rank_by_hand",
    ),
    Mutation(
        "buffers-not-padded-for-the-shards",
        "memory/model_state.py",
        "done.append((round_up(end, multiple), current))",
        "done.append((round_up(end, _BUCKET_ALIGNMENT), current))",
        _MODEL + "test_buffers_of_the_distributed_optimizer_by_hand",
    ),
    Mutation(
        "experts-sharded-like-dense-weights",
        "memory/model_state.py",
        "parallel.expert_dp if experts else parallel.dp * parallel.cp",
        "parallel.dp * parallel.cp",
        _MODEL + "test_experts_are_sharded_over_their_own_data_parallelism",
    ),
    Mutation(
        "shared-embedding-in-a-common-bucket",
        "memory/model_state.py",
        "shared = layout.spec.tie_embeddings and parallel.pp > 1",
        "shared = False",
        _MODEL + "test_a_tied_embedding_of_two_stages_has_a_bucket_of_its_own",
    ),
    Mutation(
        "all-logits-at-once",
        "memory/head.py",
        "rows = min(s.chunk, s.trained)",
        "rows = s.trained",
        _MODEL + "test_logits_exist_one_chunk_at_a_time",
    ),
    Mutation(
        "interleaved-pipeline-waits-like-a-plain-one",
        "memory/training.py",
        "2 * (pp - stage - 1) + (vpp - 1) * pp + 1",
        "(pp - stage - 1) + (vpp - 1) * pp + 1",
        _MODEL + "test_micro_batches_in_flight",
    ),
    Mutation(
        "balanced-experts-in-training",
        "memory/layers.py",
        "(s.imbalance if s.ep > 1 else 1.0)",
        "1.0",
        _MODEL + "test_activations_grow_with_tokens_and_experts_with_imbalance",
    ),
    Mutation(
        "balanced-experts-in-the-engine",
        "memory/engine.py",
        "copies / engine.expert_ranks * self.imbalance",
        "copies / engine.expert_ranks",
        _MODEL + "test_the_engine_works_on_what_the_busiest_rank_gets",
    ),
    Mutation(
        "groups-of-the-engine-not-counted",
        "memory/communicators.py",
        "        groups |= _engine(engine, use)\n",
        "        pass\n",
        _MODEL + "test_groups_of_a_step_have_a_communicator_each",
    ),
    Mutation(
        "groups-begin-at-whoever-asks",
        "memory/communicators.py",
        "rank - sum(rank // stride % size * stride for stride, size in walked)",
        "rank",
        "tests/unit/test_communicators.py::test_groups_of_a_rank_are_those_of_the_definition",
    ),
    Mutation(
        "every-member-makes-the-group",
        "memory/communicators.py",
        "            if seen[rank]:\n",
        "            if False:\n",
        "tests/unit/test_communicators.py::test_all_groups_are_those_of_every_rank_each_once",
    ),
    Mutation(
        "groups-of-one-rank-counted",
        "memory/communicators.py",
        "for name, ranks in groups.items() if len(ranks) > 1",
        "for name, ranks in groups.items()",
        _MODEL + "test_groups_of_a_step_have_a_communicator_each",
    ),
    Mutation(
        "sizes-of-group-buffers-not-predicted",
        "dryrun/budget.py",
        "_ENGINE_BUFFERS_MB | group_buffers(config.ascend.hccl_group_buffer) if npu",
        "_ENGINE_BUFFERS_MB if npu",
        "tests/unit/test_npu_flags.py::test_sizes_of_buffers_are_in_the_prediction",
    ),
    Mutation(
        "parameters-stay-during-rollouts",
        "memory/prediction.py",
        "            waiting[Owner.PARAMETERS] = 0\n",
        "            pass\n",
        _PHASES + "test_phases_hold_what_the_offload_mode_says",
    ),
    Mutation(
        "auto-offloads-everything",
        "dryrun/budget.py",
        "for mode in (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL):",
        "for mode in (OffloadMode.ALL,):",
        _PHASES + "test_auto_takes_the_least_offload_that_fits",
    ),
    Mutation(
        "reference-pass-forgotten",
        "memory/prediction.py",
        "return max(moments, key=lambda table: sum(table.values()))",
        "return moments[0]",
        _PHASES
        + "test_the_reference_pass_is_the_peak_where_it_brings_more_than_training_works_with",
    ),
    Mutation(
        "waiting-micro-batches-forgotten",
        "memory/training.py",
        "counts = Counter(flight[:-1])",
        "counts: Counter[int] = Counter()",
        _REAL + "[tp2-pp2]",
    ),
    Mutation(
        "norms-keep-one-copy",
        "memory/layers.py",
        "kept = (elements * _FP32 if input_kept else 0) + stats + elements * _FP32",
        "kept = stats + elements * _FP32",
        _MODEL + "test_a_dense_layer_keeps_what_its_operators_keep",
    ),
    Mutation(
        "dispatchers-leave-nothing",
        "memory/layers.py",
        "    return 2 * sizes.residual\n",
        "    return 0\n",
        _REAL + "[one]",
    ),
    Mutation(
        "released-without-a-copy",
        "offload/group.py",
        "                self._copy(storages, self._pool, to_host=True)\n",
        "                pass\n",
        _OFFLOAD + "test_views_stay_valid_and_every_byte_counts_once",
    ),
    Mutation(
        "half-a-restore",
        "offload/group.py",
        "            self.release()\n            raise\n",
        "            raise\n",
        _OFFLOAD + "test_a_failing_copy_changes_nothing",
    ),
    Mutation(
        "a-changed-reference-is-not-copied-again",
        "offload/group.py",
        "self._copied_at == self._num_writes()",
        "self._copied_at is not None",
        _OFFLOAD + "test_what_is_only_read_is_copied_to_the_host_once",
    ),
    Mutation(
        "packed-storages-overlap",
        "offload/packed.py",
        "        end += storage.nbytes()\n",
        "        end += storage.nbytes() // 2\n",
        _OFFLOAD + "test_packed_tensors_come_back_as_one_storage_without_a_gap",
    ),
    Mutation(
        "half-done-actions-stay",
        "phases/transition.py",
        "                    begun.append(action)\n                    action.do()\n",
        "                    action.do()\n                    begun.append(action)\n",
        "tests/unit/test_phase_faults.py::test_a_fault_before_any_line_of_any_action",
    ),
    Mutation(
        "freed-memory-is-still-called-awake",
        "rollout/vllm_engine.py",
        "        self._state = EngineState.ASLEEP\n        self._weights.free()\n",
        "        self._weights.free()\n        self._state = EngineState.ASLEEP\n",
        "tests/unit/test_phase_faults.py::test_a_fault_before_any_line_of_any_action",
    ),
    Mutation(
        "a-run-counts-other-kernels-than-its-dry-run",
        "dryrun/budget.py",
        "        kernels=machine.kernels,\n",
        "",
        "tests/unit/test_memory_budget.py::test_the_machine_is_that_of_the_platform_the_run_is_on",
    ),
    Mutation(
        "reserved-memory-is-used",
        "dryrun/budget.py",
        "return max(0, device - max(taken, int(machine.reserved_gib * _GIB)))",
        "return device",
        "tests/unit/test_memory_budget.py::test_what_is_reserved_is_taken_from_any_device",
    ),
    Mutation(
        "changed-groups-go-unnoticed",
        "trainer/parallel_state.py",
        "list(value) if isinstance(value, list) else value",
        "value",
        "tests/unit/test_process_groups.py::"
        "test_an_engine_that_touches_the_trainers_groups_is_caught[_change_in_place-"
        "_DATA_PARALLEL_GLOBAL_RANKS;]",
    ),
    Mutation(
        "swapped-optimizer-moved-twice",
        "orchestration/rl_phases.py",
        "            groups.pop(owner, None)  # MindSpeed moves it\n",
        "            pass\n",
        "tests/unit/test_memory_budget.py::test_a_swapped_optimizer_is_left_to_mindspeed",
    ),
    Mutation(
        "samples-have-no-owner",
        "orchestration/rl_phases.py",
        "    owners[Owner.SAMPLES.value] = lambda: cache.num_bytes\n",
        "",
        "tests/unit/test_memory_budget.py::test_the_ledger_knows_trainer_engine_and_samples",
    ),
    Mutation(
        "a-refreshed-reference-keeps-its-old-copy",
        "orchestration/rl_step.py",
        "        run.reference.weights_changed()\n",
        "",
        "tests/unit/test_other_models.py::test_the_policy_becomes_the_reference",
    ),
    Mutation(
        "micro-batches-of-one-update-wait",
        "memory/training.py",
        "work.num_micro_batches * work.num_updates",
        "work.num_micro_batches",
        _PHASES + "test_micro_batches_of_all_updates_wait_together",
    ),
    Mutation(
        "largest-moment-of-other-micro-batches",
        "orchestration/step_peak.py",
        "max(b.batch.num_tokens for b in batches)",
        "64",
        "tests/unit/test_step_peak.py::"
        "test_the_prediction_is_that_of_the_micro_batches_of_the_step",
    ),
    Mutation(
        "sleep-mode-loses-rotary-tables",
        "rollout/sleep_tags.py",
        "            tensor.copy_(content)\n",
        "            pass\n",
        "tests/unit/test_sleep_tags.py::"
        "test_tags_leave_one_by_one_and_what_no_update_writes_comes_back",
    ),
    Mutation(
        "leak-is-not-told",
        "observability/memory_ledger.py",
        "slope - 2 * error > self._leak_bytes",
        "slope - 2 * error > 1e3 * self._leak_bytes",
        _LEDGER + "test_a_growing_residue_is_warned_of_once[240-1]",
    ),
    Mutation(
        "budget-is-not-kept",
        "observability/memory_ledger.py",
        "free = min(free, self._budget_bytes - device.used_bytes)",
        "pass",
        _LEDGER + "test_room_is_asked_for_before_it_is_taken[30-False]",
    ),
    Mutation(
        "freed-engine-weights-count-as-synced",
        "rollout/vllm_engine.py",
        "        self._version = -1\n        self._updating = False\n"
        "        self._state = EngineState.ASLEEP",
        "        self._state = EngineState.ASLEEP",
        "tests/unit/test_vllm_engine.py::test_no_order_of_calls_generates_with_wrong_weights",
    ),
    Mutation(
        "expandable-segments-stay",
        "platforms/allocator_settings.py",
        "if len(kept) == len(parts):",
        "if len(kept) <= len(parts):",
        "tests/unit/test_allocator_settings.py::test_every_combination_of_variables",
    ),
)
