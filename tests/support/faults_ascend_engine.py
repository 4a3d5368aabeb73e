"""Named faults of the NPU's engine and of what is planned for it."""

from __future__ import annotations

from support.mutation import Mutation

_ENGINE = "tests/unit/test_ascend_engine.py::"
_CYCLES = _ENGINE + "test_three_cycles_of_sleep_wake_and_sync"
_REFUSED = "tests/unit/test_ascend_refusals.py::"
_POOL = "tests/unit/test_ascend_memory.py::"
_BUDGET = "tests/unit/test_memory_budget.py::"
_VERSIONS = "tests/unit/test_ascend_versions.py::"
_SIZES = "tests/unit/test_graph_sizes.py::"

ASCEND_ENGINE_MUTATIONS = (
    Mutation(
        "experts-turned-twice-after-waking",
        "rollout/ascend/experts.py",
        "            if not param.loadable:\n",
        "            if True:\n",
        _CYCLES,
    ),
    Mutation(
        "experts-without-their-loader",
        "rollout/ascend/experts.py",
        "getattr(param.module, param.attribute).weight_loader = _loader(param)",
        "_loader(param)",
        _CYCLES,
    ),
    Mutation(
        "layout-of-experts-by-shape",
        "rollout/ascend/experts.py",
        "same = now.shape == expected.shape and _strides(now) == _strides(expected)",
        "same = now.shape == expected.shape",
        _CYCLES,
    ),
    Mutation(
        "old-version-turns-experts-once-only",
        "rollout/ascend/experts.py",
        "                _method(param).transpose = True\n",
        "                pass\n",
        _CYCLES,
    ),
    Mutation(
        "stray-tensors-lost-in-sleep",
        "rollout/ascend/backend.py",
        "            save=True,\n",
        "            save=False,\n",
        _CYCLES,
    ),
    Mutation(
        "cache-comes-back-with-old-contents",
        "rollout/ascend/memory.py",
        "            tensor.zero_()\n",
        "            pass\n",
        _CYCLES,
    ),
    Mutation(
        "segments-expand-while-the-weights-are-there",
        "rollout/ascend/backend.py",
        "set_expandable_segments(not in_use)",
        "set_expandable_segments(in_use)",
        _ENGINE + "test_segments_expand_while_the_weights_are_away",
    ),
    Mutation(
        "ranks-counted-over-replicas",
        "rollout/vllm_engine.py",
        "str(self._rank % engine.size)",
        "str(self._rank)",
        "tests/unit/test_vllm_engine.py::test_ranks_are_counted_within_their_replica",
    ),
    Mutation(
        "failed-copy-to-the-host-passes",
        "rollout/ascend/memory.py",
        "        if status:\n",
        "        if False:\n",
        _POOL + "test_a_copy_to_the_host_that_fails_frees_nothing",
    ),
    Mutation(
        "half-a-pool-stays-unmapped",
        "rollout/ascend/memory.py",
        "        except BaseException:\n            self._map()\n",
        "        except BaseException:\n",
        _POOL + "test_calls_of_the_pool_that_fail_change_nothing",
    ),
    Mutation(
        "half-a-pool-stays-mapped",
        "rollout/ascend/memory.py",
        "            self._unmap(back)\n",
        "",
        _POOL + "test_calls_of_the_pool_that_fail_change_nothing",
    ),
    Mutation(
        "plain-tensors-beside-weights-not-kept",
        "rollout/ascend/memory.py",
        "        if at < start:\n            found.append(Span(at, start - at))\n",
        "",
        _POOL + "test_only_what_no_update_writes_is_copied",
    ),
    Mutation(
        "all-weights-copied-to-the-host",
        "rollout/ascend/memory.py",
        "lost = [span for tensor in cleared if (span := span_of(tensor))]",
        "lost: list[Span] = []",
        _POOL + "test_only_what_no_update_writes_is_copied",
    ),
    Mutation(
        "memory-by-the-counters-of-torch",
        "platforms/npu.py",
        "return DeviceMemory(total - free, free, total)",
        "return DeviceMemory(self._npu.memory_reserved(self.device), free, total)",
        _BUDGET + "test_accelerators_are_asked_by_their_driver",
    ),
    Mutation(
        "memory-of-others-forgotten",
        "dryrun/budget.py",
        "max(taken, int(machine.reserved_gib * _GIB))",
        "int(machine.reserved_gib * _GIB)",
        _BUDGET + "test_what_others_hold_is_taken_from_the_device",
    ),
    Mutation(
        "refused-keys-looked-for-at-the-top-only",
        "rollout/ascend/backend.py",
        "        _refuse_keys(value)\n",
        "",
        _REFUSED + "test_keys_that_make_rollouts_wrong_are_refused_at_any_depth",
    ),
    Mutation(
        "nz-weights-pass",
        "rollout/ascend/backend.py",
        '        if found:\n            raise RuntimeError(\n                f"vLLM-Ascend',
        '        if False:\n            raise RuntimeError(\n                f"vLLM-Ascend',
        _ENGINE + "test_an_engine_with_nz_weights_is_refused",
    ),
    Mutation(
        "size-of-the-cache-ignored-by-old-versions",
        "rollout/ascend/backend.py",
        "        if self.behaviour.cache_bytes:\n",
        "        if True:\n",
        _ENGINE + "test_the_engine_is_built_for_updates",
    ),
    Mutation(
        "key-of-the-version-before",
        "rollout/ascend_versions.py",
        'Key(f"{_A}.rl_config.sleep_mode_extra_cleanup"),',
        'Key(f"{_A}.enable_sleep_mode_extra_cleanup"),',
        _VERSIONS + "test_every_key_is_read_by_the_version",
    ),
    Mutation(
        "versions-by-the-first-digits",
        "rollout/ascend_versions.py",
        'full.startswith(known + ".")',
        "full.startswith(known)",
        _VERSIONS + "test_versions_between_are_refused",
    ),
    Mutation(
        "graph-sizes-not-optimal",
        "rollout/graph_sizes.py",
        "for j in range(i):",
        "for j in range(i - 1):",
        _SIZES + "test_no_choice_of_sizes_pads_less",
    ),
    Mutation(
        "first-token-counted-as-a-decode-step",
        "rollout/graph_sizes.py",
        "[length - 1 for length in response_lengths if length > 1]",
        "[length for length in response_lengths if length > 1]",
        _SIZES + "test_batches_follow_from_lengths",
    ),
    Mutation(
        "graphs-for-the-batch-of-one-rank",
        "rollout/patches/step_sync.py",
        "self.running[int(host[:size].max())] += 1",
        "self.running[int(host[rank])] += 1",
        "tests/unit/test_step_loop.py::test_batches_are_those_of_the_fullest_rank",
    ),
    Mutation(
        "packed-vector-forgets-who-is-left",
        "rollout/patches/step_sync.py",
        "        vector[-2] = self._unfinished\n",
        "",
        "tests/unit/test_step_loop.py::test_ranks_stop_together_when_nobody_has_requests",
    ),
    Mutation(
        "finish-looked-at-between-intervals",
        "rollout/step_loop.py",
        "steps % interval == 0 and agreement.finished()",
        "agreement.finished()",
        "tests/unit/test_step_loop.py::test_ranks_stop_together_when_nobody_has_requests",
    ),
)
