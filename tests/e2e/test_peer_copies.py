"""Killed at any border of a phase, a job goes on from the copies in memory and loses one step.

The test takes the place of the starter: it starts all ranks again with the same folder of copies.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.jobs import planted
from support.spawn import RankError, run_command
from support.whole_runs import COMMON, comparable_rows, write_inputs

from mindspeed_rl.core.owned_folders import SHARED_MEMORY, owned_folder
from mindspeed_rl.launch.attempt import PEER_FOLDER, RESTARTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Kills by the start of the job in which they come: rank, phase, its n-th entry, action. Each comes
#: in the second step after the start, which the next start repeats.
KILLS = (
    *("1:update:2:kill", "0:save:2:kill-in-copy", "1:load:1:kill"),
    *("1:reshard:3:kill", "0:generate:2:kill", "0:train:2:kill", "1:save:2:kill", "0:log:2:kill"),
    "1:build engine:1:kill",
)
FIRST = 2  # of them, in CI
ALL = "MINDSPEED_RL_TEST_ALL_KILLS"  # set it for all of them, with eight ranks


def flags(name: str, steps: int, layout: Sequence[str]) -> list[str]:
    return [
        *COMMON, *layout, "--train-iters", str(steps), "--grpo-prompts-per-step", "8",
        "--grpo-group-size", "2", "--micro-batch-size", "4", "--lr", "1e-3",
        "--use-distributed-optimizer", "--reward-function", "reward.py:digits",
        "--reward-num-workers", "1", "--max-prompt-length", "24", "--vllm-max-num-seqs", "8",
        "--rl-max-logprob-diff", "0", "--rollout-max-response-length", "6", "--output-dir", name,
        "--save", f"{name}/save",
    ]  # fmt: skip


def digest(output: Path) -> str:
    return hashlib.sha256((output / "hf" / "model.safetensors").read_bytes()).hexdigest()


def start(folder: Path, given: Sequence[str], num_ranks: int) -> str:
    """One start of the job; what rank 0 printed, or the error of the ranks."""
    try:
        return run_command("support.rl_driver", given, num_ranks, cwd=folder, timeout_s=500.0)
    except RankError as error:
        assert -9 in error.returncodes, error
        return ""


def survive(
    folder: Path,
    num_ranks: int,
    layout: Sequence[str],
    kills: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run undisturbed, then with kills; metrics and final weights are the same bits."""
    write_inputs(folder, 16)
    steps = len(kills) + 2
    for name, value in planted("", "train_rl").items():
        monkeypatch.setenv(name, value)
    assert start(folder, flags("quiet", steps, layout), num_ranks)
    given = [*flags("killed", steps, layout), "--peer-checkpoint-steps", "1"]
    monkeypatch.setenv("MINDSPEED_RL_TEST_FAULT", ";".join(kills))
    with owned_folder("peers", SHARED_MEMORY) as copies:
        monkeypatch.setenv(PEER_FOLDER, copies)
        for number in range(len(kills)):
            monkeypatch.setenv(RESTARTS, str(number))
            assert not start(folder, given, num_ranks), f"{kills[number]}: nothing was killed"
        monkeypatch.setenv(RESTARTS, str(len(kills)))
        told = start(folder, given, num_ranks)
    # Every start but those that are killed before their first step has done one, which stays done.
    done = sum(":1:" not in kill for kill in kills)
    assert f"resuming after step {done} from the copies in memory" in told
    assert comparable_rows(folder / "killed") == comparable_rows(folder / "quiet")
    assert digest(folder / "killed") == digest(folder / "quiet")


def test_killed_in_an_update_and_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survive(tmp_path, 2, (), KILLS[:FIRST], monkeypatch)


@pytest.mark.skipif(ALL not in os.environ, reason=f"takes many starts; set {ALL}")
def test_eight_ranks_killed_at_every_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    # Another rank each time: the seventh for the first kill, the second for the next, ...
    kills = [f"{(3 * i + 7) % 8}:{kill.partition(':')[2]}" for i, kill in enumerate(KILLS)]
    survive(tmp_path, 8, layout, kills, monkeypatch)
