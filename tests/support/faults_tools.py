"""Named faults of what users touch first: doctor, data preparation, trackers, profiler."""

from __future__ import annotations

from support.mutation import Mutation

_DOCTOR = "tests/unit/test_doctor.py::"
_GROUPS = "tests/unit/test_doctor_groups.py::"
_RED_FACTS = _DOCTOR + "test_a_machine_that_cannot_run_is_red"
_RED_ENVIRONMENT = _DOCTOR + "test_an_environment_that_breaks_runs_is_red"
_DATA = "tests/unit/test_data_published.py::"
_TRACKERS = "tests/unit/test_trackers.py::"
_PROFILER = "tests/unit/test_profiler.py::"
_CODE = "tests/unit/test_hf_export.py::"
_USER_FILES = "tests/unit/test_user_files.py::"

TOOL_MUTATIONS = (
    Mutation("another-version-is-green", "diagnosis/packages.py",
             "if installed is not None and _fits(installed, specifier):",
             "if installed is not None:",
             _DOCTOR + "test_a_package_outside_the_matrix_is_red"),
    Mutation("a-local-build-is-red", "diagnosis/packages.py",
             "return SpecifierSet(specifier).contains(version, prereleases=True)",
             'return not specifier.startswith("==") or installed == specifier[2:]',
             _DOCTOR + "test_local_builds_of_a_pinned_version_fit"),
    Mutation("an-engine-of-the-other-board-is-green", "diagnosis/packages.py",
             "facts.soc.upper() != facts.engine_soc.upper()", "False", _RED_FACTS),
    Mutation("a-timeout-shorter-than-the-phase-is-green", "diagnosis/environment.py",
             '("HCCL_EXEC_TIMEOUT", longest_phase_s,', '("HCCL_EXEC_TIMEOUT", 0,',
             _DOCTOR + "test_the_timeout_follows_the_longest_phase_of_the_run"),
    Mutation("ports-that-are-taken-are-green", "diagnosis/environment.py",
             "taken = sorted((host or set()) & facts.ports)", "taken: list[int] = []", _RED_FACTS),
    Mutation("a-missing-interface-is-green", "diagnosis/environment.py",
             "if missing and not", "if False and not", _RED_ENVIRONMENT),
    Mutation("more-ranks-than-devices-is-green", "diagnosis/devices.py",
             "if (ranks := local_size(facts.environ)) > usable:",
             "if (ranks := local_size(facts.environ)) > there:", _RED_ENVIRONMENT),
    Mutation("another-cann-is-green", "diagnosis/devices.py",
             "elif not found.lower().startswith(wanted.lower()):", "elif False:", _RED_FACTS),
    Mutation("any-mindspeed-is-green", "diagnosis/packages.py",
             'if wanted == branch or version == wanted.rpartition("_r")[2]:', "if place:",
             _RED_FACTS),
    Mutation("a-hanging-group-is-green", "orchestration/preflight.py",
             "failed = [g for g in axis.groups if _errors(g, axis.name, visits)]",
             "failed: list[tuple[int, ...]] = []",
             _GROUPS + "test_a_group_that_hangs_is_named_with_who_is_not_in_it"),
    Mutation("a-silent-rank-is-forgotten", "orchestration/preflight.py",
             "if rank not in told:", "if False:",
             _GROUPS + "test_a_rank_that_says_nothing_is_named"),
    Mutation("held-out-questions-are-trained", "data/published.py",
             "for question, row in rows.items() if question not in held]",
             "for question, row in rows.items()]",
             _DATA + "test_held_out_questions_do_not_depend_on_the_order_and_are_not_trained"),
    Mutation("contradicting-answers-are-kept", "data/published.py",
             "if len(several) == 1}", "if several}",
             _DATA + "test_deepscaler_leaves_contradictions_out"),
    Mutation("a-resumed-run-logs-into-the-old-one", "observability/trackers.py",
             "        self.close()\n        self._start = step",
             "        self._start = step",
             _TRACKERS + "test_trackers_begin_anew_when_told_to_forget"),
    Mutation("a-missing-tracker-is-found-late", "config/diagnostics.py",
             "if asked and not there:", "if False:",
             _TRACKERS + "test_a_package_that_is_missing_is_told_before_the_run"),
    Mutation("the-window-is-one-step-too-long", "observability/profiler.py",
             "<= step < self._config.profile_step_end", "<= step <= self._config.profile_step_end",
             _PROFILER + "test_a_window_is_one_trace_that_opens"),
    Mutation("a-mistake-is-lost-in-the-report", "orchestration/launcher_report.py",
             '"py_callstack": line', '"py_callstack": ""',
             "tests/unit/test_failures.py::test_the_report_of_the_launcher_repeats_a_mistake"),
    Mutation("phases-are-not-in-the-trace", "observability/timers.py",
             "with self._mark(phase):", "with nullcontext(phase):",
             _PROFILER + "test_phases_are_ranges_of_the_trace_and_of_no_step_outside"),
    Mutation("every-rank-is-profiled", "config/diagnostics.py",
             "(bool(everyone) or str(rank) in self.profile_ranks)", "True",
             _PROFILER + "test_only_the_ranks_that_were_asked_for"),
    Mutation("the-id-behind-the-vocabulary-is-accepted", "data/chat.py",
             "if max(token_ids) >= vocab_size:", "if max(token_ids) > vocab_size:",
             "tests/unit/test_data_prompts.py::test_a_tokenizer_of_another_model_is_refused"),
    Mutation("an-example-without-a-prompt-is-trained-on", "data/supervised.py",
             "(slice(example.num_prompt_tokens), slice(example.num_prompt_tokens, None))",
             "(slice(None),)",
             "tests/unit/test_data_supervised.py::"
             "test_an_example_without_a_prompt_token_is_refused"),
    Mutation("a-config-alone-is-a-tokenizer", "models/hf_files.py",
             "if not any((root / name).is_file() for name in VOCABULARY_FILES):",
             'if not (root / "config.json").is_file():',
             "tests/unit/test_config_validate.py::test_weights_and_tokenizer_must_be_there"),
    Mutation("a-prediction-asks-for-weights", "config/validate.py",
             "    if files:\n        find_weights(checkpoint)", "    find_weights(checkpoint)",
             "tests/unit/test_config_validate.py::test_weights_and_tokenizer_must_be_there"),
    Mutation("an-export-gets-the-tokenizer-beside-the-weights", "checkpoint/hf_writer.py",
             "(tokenizer, _TOKENIZER_FILES)", "(source, _TOKENIZER_FILES)",
             "tests/unit/test_hf_export.py::"
             "test_an_export_gets_the_tokenizer_of_the_run_and_no_file_of_another"),
    Mutation("imports-of-a-models-code-stay-behind", "models/hf_code.py",
             "open_files += [", "[",
             _CODE + "test_code_that_auto_map_names_and_no_other_is_exported"),
    Mutation("missing-code-is-told-at-the-end", "config/outputs.py",
             "        code_files(Path(config.model.hf_checkpoint), "
             "Path(config.model.tokenizer_directory))\n", "",
             _CODE + "test_code_that_is_missing_is_told_before_the_run"),
    Mutation("a-tokenizer-is-read-without-its-model", "orchestration/training.py",
             'how["config"] = AutoConfig.from_pretrained(model.hf_checkpoint)', "pass",
             "tests/unit/test_hf_export.py::"
             "test_a_bare_tokenizer_is_to_the_run_what_it_is_to_readers_of_the_export"),
    Mutation("an-environment-is-looked-for-late", "config/environment.py",
             "check_python_name(Path(path), attribute, where)", "pass",
             _USER_FILES + "test_an_environment_that_is_none_is_told_before_anything_is_loaded"),
    Mutation("imported-names-are-not-in-the-file", "config/reward_spec.py",
             'yield (node.asname or node.name).partition(".")[0]', "pass",
             _USER_FILES + "test_whatever_a_file_binds_is_accepted_and_then_found"),
    Mutation("rates-are-numbers-of-the-run", "observability/names.py",
             'or name.endswith(("_s", "_ms"))', "",
             "tests/unit/test_observability_metrics.py::"
             "test_what_measures_the_machine_is_told_by_unit_and_chapter"),
    Mutation("another-number-of-ranks-is-green", "doctor.py",
             "if given not in (0, size):", "if False:",
             "tests/unit/test_doctor_ranks.py::"
             "test_another_number_of_ranks_than_the_flag_says_is_red"),
)  # fmt: skip
