"""Writes the table of docs/practices.md: python tools/practice_map.py [--check].

Every optimisation of the CANN recipes' reports on DeepSeek-R1 and Qwen3-235B is a row: what is
published about it, which flag, code and test here are its counterpart, and how that is known. A
unit test checks that the flags, files and tests exist and that the table is up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "practices.md"
BEGIN, END = "<!-- practices: written by tools/practice_map.py -->\n", "<!-- end of practices -->\n"


class Grade(Enum):
    """How our side is known, best first. Nothing of it was measured on an NPU."""

    CPU = "tested on CPU"
    EMULATED = "emulated"
    SIGNATURE = "signature-checked"
    PASSED_ON = "passed on"
    ABSENT = "not built"


@dataclass(frozen=True, slots=True)
class Practice:
    """One optimisation.

    Attributes:
        area: heading.
        theirs: what the recipe does.
        gain: what the recipe publishes about it; empty: nothing by itself.
        ours: the counterpart, flags in backticks.
        code: below ``mindspeed_rl/``.
        test: ``file::test``.
        grade: of our side.
    """

    area: str
    theirs: str
    gain: str
    ours: str
    code: str = ""
    test: str = ""
    grade: Grade = Grade.CPU


_U, _D, _S = "tests/unit/test_", "tests/distributed/test_", "tests/simulated/test_"
WEIGHTS, DATA, MEMORY = "Weights", "Data between stages", "Memory"
ROLLOUT, TRAINING, ALGORITHM = "Rollout", "Training", "Algorithm"

PRACTICES: tuple[Practice, ...] = (
    Practice(WEIGHTS, "experts move by AlltoAllV within the training EP group, after a broadcast "
             "over the pipeline", "extra memory 14 GB -> 0.05 GB",
             "one plan for all weights: every rank receives the rectangles that it lacks; any "
             "ratio of EP, also with expert tensor parallelism; `--reshard-bucket-mb` bounds it",
             "resharding/planner.py",
             _D + "reshard.py::test_every_engine_rank_holds_the_bits_of_the_oracle"),
    Practice(WEIGHTS, "dense weights by TP-AllGather and PP-AllToAll, with names exchanged at "
             "every sync", "reshard of 11.5 s (all of it)",
             "the same plan: no name travels, nothing is gathered that is not kept; uneven and "
             "interleaved pipelines; `--reshard-transport`, `--reshard-relay`",
             "resharding/schedule.py",
             _S + "schedule.py::test_no_rank_stages_more_than_the_budget"),
    Practice(WEIGHTS, "no check of what arrived", "",
             "weights are compared bit for bit (`--reshard-verify-interval`) and by what they "
             "compute (`--rl-sync-check-tol`)",
             "resharding/checksums.py",
             _D + "reshard.py::test_proof_names_the_tensor_of_a_flipped_bit"),
    Practice(WEIGHTS, "absorbed products of latent attention are dropped and made anew after "
             "a sync",
             "", "once per update, after the proof", "rollout/ascend/weights.py",
             "tests/ascend/test_engine_weights.py::test_three_cycles_of_its_own_classes",
             Grade.EMULATED),
    Practice(DATA, "TensorCache: samples stay on the device between generation, reference and "
             "update", "208.5 -> 238.5 TPS per card (+14.4 %); start skew 57 s -> < 1 s and "
             "73 s -> 5 s", "samples of any length keep to the rank that made them and move once, "
             "packed, to where they train; no limits on batch, balance or packing",
             "experience/tensor_cache.py",
             _U + "tensor_cache.py::test_nothing_else_is_read_in_its_place"),
    Practice(DATA, "redistribution by all-to-all on the world with equal padded shapes", "",
             "one packed all-to-all-v; nothing moves where it is already",
             "experience/redistribute.py",
             _U + "redistribution.py::test_nothing_moves_where_source_and_destination_agree"),
    Practice(DATA, "copies of a hard prompt on different data-parallel ranks (Qwen3)",
             "-25 % end to end; 92 -> 186 tokens/s at batch 128 -> 256",
             "samples are dealt to engines by the lengths of earlier responses: "
             "`--rollout-balance`; training rows by work: imbalance below 1 %, "
             "`--max-tokens-per-micro-batch`", "data/lengths.py",
             _U + "lengths.py::test_siblings_of_a_hard_prompt_are_spread"),
    Practice(MEMORY, "gradients released after the update, cache allocated last, weights of the "
             "trainer kept until the reshard", "offload 5.5 s (real weights)",
             "states with that order, undone on errors, one pinned pool: `--rl-offload`, "
             "`--rollout-sleep`", "phases/machine.py",
             _U + "phases.py::test_a_cycle_wakes_weights_then_syncs_then_wakes_the_cache"),
    Practice(MEMORY, "expandable segments switched at run time (Qwen3)", "",
             "taken out of the environment; on while training, off while the engine has its "
             "weights", "platforms/npu_allocator.py",
             "tests/ascend/test_bootstrap.py::test_the_adaptor_changes_nothing_for_others",
             Grade.EMULATED),
    Practice(MEMORY, "swap-optimizer of MindSpeed", "", "`--swap-optimizer`", "config/npu.py",
             _U + "npu_flags.py::test_mindspeed_is_told_what_differs", Grade.PASSED_ON),
    Practice(MEMORY, "recomputation tuned by hand (4 or 8 layers of a stage)",
             "123 (4 layers), 112 TPS per card (8)",
             "`--recompute-granularity`, and `--rl-dry-run` says before the run what fits",
             "memory/training.py",
             _S + "dry_run.py::test_recomputing_four_layers_costs_what_four_layers_keep"),
    Practice(MEMORY, "moe_zero_memory (Qwen3)", "",
             "`--recompute-granularity selective --recompute-modules moe`; MindSpeed's own is "
             "refused, since it replaces the expert layer", "config/recompute.py",
             _D + "memory_prediction.py::test_recomputation_changes_memory_and_no_number"),
    Practice(MEMORY, "communicators cost about 400 MB each", "",
             "groups are listed at start; `--hccl-group-buffer` by name",
             "memory/communicators.py", _U + "npu_flags.py::test_buffers_of_groups",
             Grade.EMULATED),
    Practice(ROLLOUT, "vLLM in the training process, experts over attention data parallelism",
             "rollout 271 TPS per card (EP128 x 2)", "`--rollout-tp`, `--rollout-dp`, "
             "`--rollout-ep`, no private port arithmetic", "rollout/vllm_engine.py",
             _D + "family_sync.py::test_three_syncs_equal_a_fresh_load"),
    Practice(ROLLOUT, "agreement of data-parallel ranks over HCCL instead of Gloo",
             "14 ms -> 3 ms per step; 519 -> 618 TPS",
             "one packed reduction per step instead of two: `--rollout-dp-sync`, "
             "`--rollout-dp-sync-interval`", "rollout/patches/step_sync.py",
             _D + "step_sync.py::test_samples_are_those_of_the_unpatched_engine"),
    Practice(ROLLOUT, "graph mode (TorchAir; ACLGraph and npugraph_ex in Qwen3)",
             "decode about 2 x", "`--rollout-graph-mode`, translated for each version",
             "rollout/ascend_versions.py",
             _U + "ascend_versions.py::test_every_key_is_read_by_the_version", Grade.SIGNATURE),
    Practice(ROLLOUT, "torch.compile and torch.jit.script put back after MindSpeed's adaptor, "
             "which replaces them by nothing", "", "put back at the start, for vLLM; fused "
             "functions of megatron-core keep the replacement", "platforms/npu_install.py",
             "tests/ascend/test_bootstrap.py::test_the_adaptor_changes_nothing_for_others",
             Grade.EMULATED),
    Practice(ROLLOUT, "several graph sizes for the long tail",
             "6482 -> 2861 s (DeepSeek, 32K); 10213 -> 7841 s (Qwen3-235B)",
             "`--rollout-graph-sizes auto` chooses them from the steps of the run before",
             "rollout/graph_sizes.py", _U + "graph_sizes.py::test_no_choice_of_sizes_pads_less"),
    Practice(ROLLOUT, "multi-stream experts and latent attention", "-6 ms per token, +7 %",
             "`--rollout-multistream-moe`, `--rollout-multistream-mla`",
             "rollout/ascend_versions.py",
             _U + "ascend_versions.py::test_a_flag_is_set_or_refused_with_a_way_out",
             Grade.SIGNATURE),
    Practice(ROLLOUT, "cache of latent attention in NZ", "> 1 ms per token at 3K",
             "`--rollout-kv-nz`, where the version has it", "rollout/ascend_versions.py",
             _U + "ascend_versions.py::test_a_flag_is_set_or_refused_with_a_way_out",
             Grade.SIGNATURE),
    Practice(ROLLOUT, "ReduceScatter instead of AllReduce between TP and EP; grouped list type",
             "-2 ms (+3 %); -9 ms", "part of vLLM-Ascend since; nothing to set here", "", "",
             Grade.ABSENT),
    Practice(ROLLOUT, "garbage collector off while decoding, processes bound to cores",
             "137.6 -> 124.7 ms per token", "not set by this project; vLLM-Ascend's own binding "
             "is switched off for shared cards", "", "", Grade.ABSENT),
    Practice(ROLLOUT, "max_num_batched_tokens 1024 against out-of-memory with real weights", "",
             "`--rl-dry-run-expert-imbalance` predicts it before the run",
             "memory/engine.py", _S + "dry_run.py::"
             "test_deepseek_runs_out_of_memory_at_8192_batched_tokens_and_not_at_1024"),
    Practice(ROLLOUT, "rollout rebalance: requests move between engines in the long tail",
             "2861 -> 2291 s (DeepSeek, 32K); 7841 -> 6102 s (Qwen3-235B)",
             "`--rollout-rebalance`: requests move as tokens through supported calls; log-probs, "
             "streams and finish reasons go along", "rollout/rebalance_plan.py",
             _S + "rebalance.py::test_nothing_is_lost_doubled_or_changed"),
    Practice(ROLLOUT, "SAM speculative decoding (Qwen3-32B)",
             "+8 to 11 %, with graphs 29 to 33 %", "refused: `--vllm-speculative-config`; only the "
             "policy itself samples", "config/vllm_options.py", "", Grade.ABSENT),
    Practice(ROLLOUT, "dynamic EPLB", "no gain on real weights",
             "a static map of experts: `--rollout-expert-map`", "rollout/expert_map.py",
             _U + "check_engine.py::test_a_map_of_experts_becomes_slots_of_the_layout"),
    Practice(TRAINING, "old log-probs not computed when there is one minibatch",
             "a whole forward pass", "`--old-logprob on-policy`, checked; with several minibatches "
             "the first is left out", "orchestration/rl_batch.py",
             _U + "rl_step.py::test_on_policy_samples_must_come_from_the_present_weights"),
    Practice(TRAINING, "reference pass", "144.5 of 859.7 s",
             "left out with `--grpo-kl-beta` 0", "orchestration/rl_job.py",
             _U + "rl_step.py::test_reference_logprobs_are_the_references"),
    Practice(TRAINING, "uneven pipeline (num_layer_list), moe_tp_extend_ep", "",
             "`--num-layer-list`, `--moe-tp-extend-ep`, `--noop-layers`", "parallel/stages.py",
             _D + "families.py::test_gradients_follow_the_norm_rule"),
    Practice(TRAINING, "fused operators of MindSpeed compiled before the run (seven builders, "
             "`ray_start_npu.sh` of Qwen3)", "", "MindSpeed compiles each with ninja and CANN at "
             "its first use, which makes the first step longer", "", "", Grade.ABSENT),
    Practice(TRAINING, "context parallelism over 35K tokens (Qwen3-235B, CP4)", "",
             "`--context-parallel-size`: keys and values are gathered; ring and Ulysses are not "
             "used", "trainer/packed_attention.py",
             _U + "context_split.py::test_attention_of_all_ranks_is_that_of_the_row"),
    Practice(TRAINING, "hybrid data parallelism: groups of context parallelism by micro-batch",
             "5 % (CP4) to > 25 % (CP8)", "not built; rows are balanced by work instead", "", "",
             Grade.ABSENT),
    Practice(TRAINING, "overlap of expert communication (alltoall_overlap)", "",
             "refused on NPUs: it replaces the expert layer, whose weights then have other names",
             "config/npu.py", _U + "npu_flags.py::test_what_breaks_rl_is_refused_with_the_reason",
             Grade.ABSENT),
    Practice(ALGORITHM, "DAPO for Qwen3-235B", "41.88 TPS per card at batch 128",
             "`--grpo-filter-groups-with-same-reward`, `--grpo-clamp-eps-upper`, "
             "`--rl-overlong-buffer`, `--rl-loss-aggregation`", "orchestration/rl_resample.py",
             _U + "dynamic_sampling.py::test_groups_of_equal_rewards_are_replaced"),
    Practice(ALGORITHM, "loss averaged per micro-batch", "",
             "denominators of the whole optimizer step, whatever the layout",
             "algorithms/aggregation.py", _D + "training.py::test_gradients_follow_the_norm_rule"),
    Practice(ALGORITHM, "reward: the answer is a substring of the response", "",
             "`--reward-function` math: equality of the final answer", "rewards/math_answer.py",
             _U + "rewards_functions.py::test_math_reward"),
)  # fmt: skip


def lines() -> list[str]:
    """The table, by area."""
    count = Counter(practice.grade for practice in PRACTICES)
    grades = ", ".join(f"{grade.value} {count[grade]}" for grade in Grade)
    rows = [f"Rows: {grades}.", ""]
    for area in dict.fromkeys(practice.area for practice in PRACTICES):
        rows += [f"## {area}", ""]
        rows += ["| theirs | published | ours | code | test | grade |", "|---|---|---|---|---|---|"]
        for p in PRACTICES:
            if p.area != area:
                continue
            code = f"`{p.code}`" if p.code else ""
            test = f"`{p.test}`" if p.test else ""
            cells = (p.theirs, p.gain, p.ours, code, test, p.grade.value)
            rows.append("| " + " | ".join(cells) + " |")
        rows.append("")
    return rows


def document(text: str) -> str:
    """The page with the table in its place."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n".join(lines()) + END + tail


def main() -> int:
    """Write, or with --check compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    before = TARGET.read_text(encoding="utf-8")
    after = document(before)
    if args.check and before != after:
        print("docs/practices.md is out of date; run python tools/practice_map.py", file=sys.stderr)
        return 1
    if not args.check:
        TARGET.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
