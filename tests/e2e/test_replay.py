"""--replay: a step of a run again, in another process, with real megatron-core and vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.spawn import RankError, run_command
from support.whole_runs import COMMON, TRAIN_RL, rows_of, write_inputs

from mindspeed_rl.replay.compare import differences
from mindspeed_rl.replay.record import read_record

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Two optimizer steps a step, of which only the second is off-policy: clipping counts there.
RUN = (
    *COMMON, "--output-dir", "out", "--save", "out/save", "--save-interval", "1",
    "--train-iters", "3", "--use-distributed-optimizer", "--lr", "1e-2",
    "--eval-prompt-data", "heldout.jsonl", "--eval-interval", "1",
    "--reward-function", "reward.py:differing", "--grpo-prompts-per-step", "4",
    "--grpo-group-size", "4", "--global-batch-size", "8", "--micro-batch-size", "4",
    "--max-prompt-length", "24", "--rollout-max-response-length", "6",
    "--vllm-max-num-seqs", "16", "--log-rollouts", "4", "--log-rollout-tokens",
    "--grpo-kl-beta", "0.01",
)  # fmt: skip


def run(folder: Path, flags: Sequence[str], num_ranks: int = 2) -> str:
    """What rank 0 of a run said, which ends well."""
    return run_command(TRAIN_RL[1], [*RUN, *flags], num_ranks, cwd=folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, of which a checkpoint after step 1 and one after 2 are left."""
    folder = tmp_path_factory.mktemp("replay")
    write_inputs(folder, 24, heldout=4)
    run(folder, [])
    shutil.rmtree(folder / "out/save/iter_0000003")
    return folder


LOCKED = """
import sys
from mindspeed_rl.launch.run_lock import lock_folders
lock_folders({"--save": "out/save", "--output-dir": "out"}, "out")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_that_runs(folder: Path) -> Iterator[None]:
    """The folders are those of a run that goes on."""
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        yield
        process.kill()


def test_a_step_gives_its_numbers_again(world: Path) -> None:
    """While the run goes on, which stays as it was; a changed flag is named where it comes in."""
    before = {p: p.read_bytes() for p in (world / "out").glob("*.jsonl")}
    weeks = ["--async-save", "--save-total-limit", "3", "--exit-duration-in-mins", "1430"]
    with another_process_that_runs(world):
        said = run(world, [*weeks, "--replay", "3", "out"])
    assert "resuming after step 2 from out/save/iter_0000002" in said
    assert "replay of step 3: equal to out in " in said and "and 4 rollouts" in said
    assert {p: p.read_bytes() for p in (world / "out").glob("*.jsonl")} == before
    kept = {path.name for path in (world / "out/save").glob("iter_*")}
    assert kept == {"iter_0000001", "iter_0000002"}
    folder = world / "out/replay/step_0000003"
    assert [row["step"] for row in rows_of(folder)] == [3]
    record = read_record(folder / "record.npz")
    names = [stage.name for stage in record.stages]
    for role in ("policy pass 1", "reference pass 1", "policy update 1", "policy update 2"):
        assert f"{role}, hidden states after layer 1" in names

    with pytest.raises(RankError) as failed:
        run(world, ["--replay", "3", "out", "--lr", "2e-2"])
    said = str(failed.value)
    assert "replay of step 3 differs from out/replay/step_0000003/record.npz" in said
    assert "first in policy update 1, change of weights: model.embed_tokens.weight" in said
    changed = read_record(folder / "record-2.npz")
    assert changed.flags["--lr"] == "0.02" and record.flags["--lr"] == "0.01"
    first = differences(changed, record, 0.0)[0]
    assert first.stage == "policy update 1, change of weights"


def test_a_step_before_all_checkpoints_is_refused(world: Path) -> None:
    shutil.copytree(world / "out", world / "late")
    shutil.rmtree(world / "late/save/iter_0000001")
    with pytest.raises(RankError, match=r"--replay 2: late/save has no checkpoint of an earlier"):
        run(world, ["--save", "late/save", "--replay", "2", "late"])


def test_a_step_of_one_rank_is_replayed_on_two_tensor_parallel_ones(tmp_path: Path) -> None:
    """Equal but for the rounding of another layout; a changed flag is beyond that."""
    write_inputs(tmp_path, 24, heldout=4)
    run(tmp_path, [], 1)
    shutil.rmtree(tmp_path / "out/save/iter_0000003")
    split = ["--tensor-model-parallel-size", "2", "--replay", "3", "out"]
    said = run(tmp_path, split)
    assert "resuming after step 2 from out/save/iter_0000002" in said
    assert "replay of step 3: equal to out in " in said and "and 4 rollouts" in said
    (replayed,) = rows_of(tmp_path / "out/replay/step_0000003")
    (original,) = [r for r in rows_of(tmp_path / "out") if r["step"] == 3 and "loss/policy" in r]
    assert replayed["optimizer/grad_norm"] == pytest.approx(original["optimizer/grad_norm"], 1e-4)
    with pytest.raises(RankError, match="replay of step 3 differs from out, first in"):
        run(tmp_path, [*split, "--replay-tolerance", "0"])
