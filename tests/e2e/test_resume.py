"""A run that is stopped and resumed gives the numbers of one that was not.

Real megatron-core and real vLLM; what is killed was started by torchrun.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from make_task_data import generate_task, write_jsonl
from support.spawn import RankError, run_command
from support.whole_runs import comparable_rows, run_entry, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts, supervised pairs, and a reward."""
    folder = tmp_path_factory.mktemp("resume")
    write_inputs(folder, 24, heldout=4)
    write_jsonl(folder / "other.jsonl", generate_task("digit_sort", 24, seed=1))
    return folder


RUN = [
    "--hf-checkpoint", "model", "--platform", "cpu", "--make-vocab-size-divisible-by", "8",
    "--train-iters", "4", "--save-interval", "2", "--use-distributed-optimizer",
    "--lr", "1e-3", "--lr-warmup-iters", "1", "--lr-decay-style", "linear",
]  # fmt: skip


def run(folder: Path, num_ranks: int, entry: str, flags: Sequence[str]) -> str:
    """One job of an entry, which ends well; what rank 0 said."""
    return run_command(f"mindspeed_rl.{entry}", [*RUN, *flags], num_ranks, cwd=folder)


def interrupt(folder: Path, name: str, step: int) -> None:
    """Leave of the run ``name`` what a kill after the save of ``step`` leaves: ``name``-cut."""
    cut = folder / f"{name}-cut"
    shutil.copytree(folder / name, cut)
    for path in (cut / "save").glob("iter_*"):
        if path.name != f"iter_{step:07d}":
            shutil.rmtree(path)
    (cut / "save" / f"iter_{step + 2:07d}.partial").mkdir()


def test_resumed_rl_run_equals_the_uninterrupted_one(world: Path) -> None:
    """With all the state a run can have: an adapted coefficient, groups left over, lengths.

    Responses grow in passes, and requests move between the two engines. A rank is killed while the
    last step is saved.
    """
    flags = [
        "--prompt-data", "train.jsonl", "--eval-prompt-data", "heldout.jsonl",
        "--eval-interval", "1", "--reward-function", "reward.py:digits",
        "--grpo-prompts-per-step", "5", "--grpo-group-size", "4", "--global-batch-size", "10",
        "--micro-batch-size", "4", "--max-prompt-length", "24",
        "--rollout-max-response-length", "6", "--vllm-max-num-seqs", "16",
        "--log-rollouts", "2", "--rl-max-logprob-diff", "0", "--old-logprob", "recompute",
        "--grpo-kl-beta", "0.01", "--rl-kl-target", "0.001", "--rl-kl-horizon", "100",
        "--grpo-filter-groups-with-same-reward", "--rl-resample-factor", "1.6",
        "--rl-inference-logprobs-is-correction", "--partial-rollout-tokens", "4",
        "--rollout-rebalance", "all", "--rollout-rebalance-interval", "2",
        "--seed", "9",  # with which step 2 leaves a group over
    ]  # fmt: skip
    places = ["--output-dir", "rl", "--save", "rl/save", "--async-save"]
    said = run(world, 2, "train_rl", [*flags, *places])
    assert "saved rl/save/iter_0000002" in said and "saved rl/save/iter_0000004" in said
    places = ["--output-dir", "rl-cut", "--save", "rl-cut/save"]
    killed = run_entry(world, [*RUN, *flags, *places], fault="1:save:2:kill", limit_s=420.0)
    assert killed.returncodes != (0,) and "rank 1 in phase save: process" in killed.output
    said = run(world, 2, "train_rl", [*flags, *places, "--load", "rl-cut/save"])
    assert "resuming after step 2 from rl-cut/save/iter_0000002" in said
    assert "iter_0000004.partial: its save did not finish" in said

    expected, found = (comparable_rows(world / run) for run in ("rl", "rl-cut"))
    assert found == expected
    evaluated = [record["step"] for record in found if "eval/reward" in record]
    trained = [record for record in found if "eval/reward" not in record]
    assert evaluated == [0, 1, 2, 3, 4], "each under its own step, once, the last one included"
    assert [record["step"] for record in trained] == [1, 2, 3, 4]
    assert trained[2]["optimizer/grad_norm"] > 0 and trained[2]["policy/version"] == 6
    rollouts = [(world / run / "rollouts.jsonl").read_text() for run in ("rl", "rl-cut")]
    assert rollouts[0] == rollouts[1] and len(rollouts[0].splitlines()) == 8
    before, after = (
        json.loads((world / run / "summary.json").read_text()) for run in ("rl", "rl-cut")
    )
    same = ("parameters_abs_sum", "steps", "worst_mismatch", "accuracy_before", "accuracy_after",
            "accuracy_lenient_before", "accuracy_lenient_after", "eval_prompts")  # fmt: skip
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert before["eval_prompts"] == 4 and before["steps"] == 4
    states = [(world / run / "save/iter_0000004/checkpoint.json") for run in ("rl", "rl-cut")]
    records = [json.loads(path.read_text()) for path in states]
    first, second = (record["extra"] for record in records)
    tokens = [record["files"].get("run_state.safetensors") for record in records]
    assert tokens[0] == tokens[1], "of what is carried over"
    kept = ("sampler", "kl_beta", "carryover", "num_partial", "lengths", "version")
    assert {n: first[n] for n in kept} == {n: second[n] for n in kept}
    assert first["sampler"]["fingerprint"] and first["kl_beta"] != 0.01
    middle = json.loads((world / "rl/save/iter_0000002/checkpoint.json").read_text())
    carried = middle["extra"]["carryover"]
    assert carried["samples"], "the resumed run must have had groups to take over"
    assert carried["columns"]["token_ids"] == {"tensor": "carryover.columns.token_ids"}
    assert middle["files"]["run_state.safetensors"]["xxh3"]


def test_resumed_supervised_run_and_its_refusals(world: Path) -> None:
    flags = ["--global-batch-size", "10", "--micro-batch-size", "4", "--hidden-dropout", "0.1"]
    data = ["--sft-data", "train.jsonl"]
    places = ["--output-dir", "sft", "--save", "sft/save", "--async-save"]
    run(world, 1, "pretrain", [*flags, *data, *places])
    interrupt(world, "sft", 2)
    places = ["--output-dir", "sft-cut", "--save", "sft-cut/save"]
    load = ["--load", "sft-cut/save"]

    changed = [*flags, "--sft-data", "other.jsonl", *places, *load]
    with pytest.raises(RankError, match="error: the checkpoint's sampler belongs to") as refused:
        run(world, 1, "pretrain", changed)
    assert "--allow-changed-data" in str(refused.value)
    assert len(comparable_rows(world / "sft-cut")) == 4, "a refusal must change nothing"

    run(world, 1, "pretrain", [*flags, *data, *places, *load])
    expected, found = (comparable_rows(world / run) for run in ("sft", "sft-cut"))
    assert found == expected and [record["step"] for record in found] == [1, 2, 3, 4]

    places = ["--output-dir", "sft-new", "--save", "sft-new/save"]
    other = ["--sft-data", "other.jsonl", *places, *load, "--train-iters", "5"]
    run(world, 1, "pretrain", [*flags, *other, "--allow-changed-data"])
    assert [record["step"] for record in comparable_rows(world / "sft-new")] == [5]
