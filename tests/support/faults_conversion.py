"""Named faults of checkpoint conversions."""

from __future__ import annotations

from support.mutation import Mutation

_CLASSIC = (
    "tests/unit/test_convert_checkpoint.py::test_classic_files_are_those_of_an_independent_writer"
)
_FAULTS = "tests/unit/test_convert_faults.py::"
_KILLS = "tests/unit/test_convert_kills.py::"
_MEMORY = "tests/unit/test_convert_memory.py::"
_CONVERT = "tests/unit/test_convert_checkpoint.py::"

CONVERSION_MUTATIONS = (
    Mutation(
        "empty-slots-are-not-counted",
        "resharding/layouts/checkpoint_files.py",
        "return Place(place.stage, place.chunk, self.slots[chunk][place.local])",
        "return place",
        _CLASSIC + "[interleaved-noop]",
    ),
    Mutation(
        "extended-experts-dealt-to-tensor-parallel-ranks-last",
        "resharding/layouts/checkpoint_files.py",
        "        return self.parallel.expert_coords(rank).ep // "
        "(self.parallel.tp if self.extends_ep else 1)",
        "        return self.parallel.expert_coords(rank).ep % self.num_file_ep",
        _CLASSIC + "[extended-grouped]",
    ),
    Mutation(
        "stacked-experts-not-transposed",
        "models/file_names.py",
        "inner=row.inner, transposed=True",
        "inner=row.inner, transposed=False",
        _CLASSIC + "[experts-cut-grouped]",
    ),
    Mutation(
        "key-value-above-the-query",
        "models/file_names.py",
        '            self.query.replace("{q}", name): spec.dims((rows, "hidden_size")),\n'
        '            self.key_value: spec.dims(("kv_a_size", "hidden_size")),',
        '            self.key_value: spec.dims(("kv_a_size", "hidden_size")),\n'
        '            self.query.replace("{q}", name): spec.dims((rows, "hidden_size")),',
        _CLASSIC + "[plain-query]",
    ),
    Mutation(
        "halves-of-heads-swapped",
        "models/attention_rules.py",
        "return first + second, first * self.part, second if self.part else first",
        "return first + second, second * (1 - self.part), second if self.part else first",
        _CLASSIC + "[split]",
    ),
    Mutation(
        "factors-of-the-next-block",
        "conversion/source.py",
        "factors = factors.narrow(dim, lo % block, box.size[dim])",
        "factors = factors.narrow(dim, 0, box.size[dim])",
        _CONVERT + "test_quantised_blocks_become_bfloat16",
    ),
    Mutation(
        "padding-is-what-memory-held",
        "conversion/target.py",
        "            values.zero_()  # declared padding",
        "            pass",
        _CONVERT + "test_a_vocabulary_is_padded_with_zeros_and_cut_again",
    ),
    Mutation(
        "chunks-of-a-stack-ignore-their-position",
        "conversion/distributed_source.py",
        "if any(not lo <= p < lo + n for p, lo, n in",
        "if any(False and lo <= p < lo + n for p, lo, n in",
        _CONVERT + "test_megatron_to_megatron_over_both_formats[qwen2-tied]",
    ),
    Mutation(
        "code-in-a-pickle-is-run",
        "conversion/torch_files.py",
        "return _KNOWN.get((module, name), Unknown)",
        "return _KNOWN.get((module, name)) or super().find_class(module, name)",
        _CONVERT + "test_a_torch_file_that_names_code_runs_none_of_it",
    ),
    Mutation(
        "a-cut-off-note-counts",
        "conversion/journal.py",
        "for line in lines[:-1]:  # the last is cut off, or empty",
        "for line in filter(None, lines):",
        _KILLS + "test_a_note_that_was_cut_off_is_not_believed",
    ),
    Mutation(
        "another-source-goes-on",
        "conversion/journal.py",
        "digest.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())",
        "digest.update(repr((str(path), status.st_size)).encode())",
        _KILLS + "test_another_source_or_layout_starts_anew",
    ),
    Mutation(
        "blocks-are-kept-until-the-end",
        "conversion/run.py",
        "            self._bytes = torch.empty(needed, dtype=torch.uint8)\n"
        "        return self._bytes[:needed]",
        "            pass\n"
        "        self.kept = [*getattr(self, 'kept', []), torch.empty(needed, dtype=torch.uint8)]\n"
        "        return self.kept[-1]",
        _MEMORY + "test_memory_does_not_grow_with_the_number_of_layers",
    ),
    Mutation(
        "a-resumed-bar-begins-at-nothing",
        "conversion/run.py",
        "        advance(kept)\n",
        "",
        _MEMORY + "test_a_bar_goes_from_what_was_written_before_to_all_bytes",
    ),
    Mutation(
        "wrong-files-are-taken-up-again",
        "conversion/run.py",
        "        journal.discard()\n",
        "",
        _FAULTS + "test_verify_finds_a_bit_that_was_lost",
    ),
    Mutation(
        "a-source-that-fails-is-the-targets-disk",
        "conversion/stored.py",
        "    except OSError as error:  # those of the target's disk mean something else\n",
        "    except NotImplementedError as error:\n",
        _FAULTS + "test_a_source_that_fails_while_it_is_read_is_named[convert]",
    ),
    Mutation(
        "what-could-not-be-compared-is-thrown-away",
        "conversion/run.py",
        "    except UnreadableError:  # nothing is known to be wrong\n        raise\n",
        "",
        _FAULTS + "test_a_source_that_fails_while_it_is_read_is_named[verify]",
    ),
    Mutation(
        "a-named-target-is-in-its-own-way",
        "conversion/journal.py",
        "self.named = ours and not self.out.is_dir() and self._is_there()",
        "self.named = False",
        _KILLS + "test_a_target_that_was_named_before_a_kill_is_done",
    ),
    Mutation(
        "notes-without-files-are-believed",
        "conversion/journal.py",
        "        if self.named or (ours and self.out.is_dir()):\n",
        "        if self.named or ours:\n",
        _KILLS + "test_a_target_that_was_taken_away_is_written_again",
    ),
    Mutation(
        "target-named-before-it-is-written",
        "conversion/run.py",
        "            _run_jobs(source, target, journal, workers, advance)\n"
        "            _finish(target, journal)\n",
        "            journal.commit()\n            journal.out.symlink_to(directory)\n"
        "            _run_jobs(source, target, journal, workers, advance)\n"
        "            _finish(target, journal)\n",
        _KILLS + "test_what_is_noted_is_not_written_again",
    ),
)
