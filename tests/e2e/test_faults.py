"""A rank fails in any phase: all end within a minute with the cause, nothing stays.

Most faults hit a rehearsal: the real entry, watchdog and reward workers with the phases of a run
but without its work, and a watchdog of little patience. The last test kills ranks of a real run,
inside vLLM's constructor and inside a collective. That a run without a fault ends well is shown by
test_learning.py.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.jobs import (
    DRIVER,
    Ended,
    TorchrunJob,
    free_port,
    planted,
    processes_of,
    shared_memory_left,
)
from support.whole_runs import COMMON, write_inputs

from mindspeed_rl.launch.bootstrap import World, tidy_temporary_folders

pytestmark = pytest.mark.e2e

START_S = 300.0  # of a job, on a busy machine
LIMIT_S = 60.0
PHASE_TIMEOUT_S = 10
SILENT = "rank {} in phase {}: no heartbeat for"
# One phase of each kind: inside vLLM's constructor, while the peer waits for reward workers or for
# a file, is inside a collective of samples or in the rounds of weights, or leaves.
KILLED = (
    "0:build engine:1:kill", "1:reward:2:kill", "1:save:1:kill", "1:exchange:2:kill",
    "1:reshard:3:kill-in-rounds", "0:export:1:kill",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a reward."""
    folder = tmp_path_factory.mktemp("faults")
    write_inputs(folder, 16)
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    """One port for all jobs: each proves that the one before released it."""
    return free_port()


def flags(phase_timeout_s: float) -> list[str]:
    return [
        *COMMON, "--pipeline-model-parallel-size", "2",
        "--train-iters", "2", "--grpo-prompts-per-step", "4", "--grpo-group-size", "2",
        "--micro-batch-size", "4", "--lr", "1e-3", "--reward-function", "format",
        "--reward-num-workers", "1", "--max-prompt-length", "24", "--vllm-max-num-seqs", "8",
        "--rollout-max-response-length", "6", "--output-dir", "out",
        "--phase-timeout-s", str(phase_timeout_s), "--reward-timeout-s", "3",
        "--overwrite-output-dir",
    ]  # fmt: skip


def rehearse(
    world: Path,
    port: int,
    fault: str,
    *,
    nodes: int = 1,
    timeout_s: float = 600.0,
    fresh: bool = False,
    **variables: str,
) -> TorchrunJob:
    return TorchrunJob(
        world, [DRIVER], flags(timeout_s), num_ranks=2 // nodes, num_nodes=nodes, port=port,
        environment=planted(fault) | variables, fresh=fresh,
    )  # fmt: skip


def causes(ended: Ended) -> list[str]:
    """What the ranks say about the end, torchrun's report left out."""
    return re.findall(r"^support\.rl_driver: (.*)$", ended.output, re.MULTILINE)


def end_after_start(job: TorchrunJob) -> Ended:
    """The end of a job, counted from its first step."""
    job.wait_for_text("rehearsal starts", START_S)
    ended = job.end(LIMIT_S)
    assert all(ended.returncodes), ended.output
    return ended


def test_a_rank_that_raises_is_named_once(world: Path, port: int) -> None:
    with rehearse(world, port, "1:reward:2:raise", fresh=True) as job:
        ended = end_after_start(job)
    cause = "the job ends: rank 1 in phase reward: RuntimeError: planted fault"
    _only(causes(ended), cause, ended)
    assert ended.output.count("RuntimeError: planted fault\n") <= 3, "its traceback and two reports"
    assert "stacks of rank" not in ended.output


@pytest.mark.parametrize(
    ("fault", "timeout_s", "cause"),
    [
        (
            "1:train:1:sleep",
            PHASE_TIMEOUT_S,
            f"exceeded {PHASE_TIMEOUT_S} s, see --phase-timeout-s ",
        ),
        ("1:reward:2:loop", PHASE_TIMEOUT_S, f"exceeded {PHASE_TIMEOUT_S} s, see "),
        pytest.param("0:export:1:stop", 600, SILENT.format(0, "export"), marks=pytest.mark.slow),
        pytest.param(
            "1:build engine:1:native", 600, SILENT.format(1, "build engine"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_hangs_ends_the_job_with_all_stacks(
    world: Path, port: int, fault: str, timeout_s: float, cause: str, tmp_path: Path
) -> None:
    with rehearse(world, port, fault, timeout_s=timeout_s, TMPDIR=str(tmp_path)) as job:
        ended = end_after_start(job)
    told = causes(ended)
    assert len(told) == 1 and cause in told[0], ended.output
    culprit = int(fault[0])
    assert f"stacks of rank {1 - culprit}:" in ended.output
    # The other rank waits for it in a collective, which is named with the line that called it.
    assert re.search(
        rf"Collectives: rank {1 - culprit} waits in allreduce no\. \d+ of world \(ranks 0-1\), "
        rf"float32\[1\], at support/rl_driver\.py:\d+; missing there: rank {culprit}; rank "
        rf"{culprit} \(phase {fault.split(':')[1]}\) ",
        told[0],
    ), told[0]
    if fault.endswith(("sleep", "loop")):
        assert "is in no collective; its last was " in told[0]
        assert "stacks of rank 1:" in ended.output and "last collectives of rank 0:" in ended.output
        left = [path.name for path in tmp_path.iterdir()]
        assert not [name for name in left if name.startswith("mindspeed_rl-")], "left by the ranks"
    if fault.endswith("sleep"):
        assert re.search(r"train for \d+ s: rank 0-1", told[0])
    elif fault.endswith("loop"):
        assert re.search(r"reward for \d+ s: rank 1", told[0])
    else:  # its neighbour aborts it, which prints its stacks even without Python's lock
        assert "Fatal Python error: Aborted" in ended.output
        assert re.search(r'rl_driver\.py", line \d+ in rehearsal', ended.output)


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_node(world: Path, port: int) -> None:
    with rehearse(world, port, "1:generate:1:kill", nodes=2) as job:
        ended = end_after_start(job)
    told = causes(ended)
    assert len(told) == 1, ended.output
    assert "rank 1 in phase generate: process" in told[0] and "on node 1 is gone" in told[0]


def test_folders_of_a_killed_rank_are_removed(
    world: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its neighbour, which removes its own; torchrun's, which it reads, by the next start."""
    with rehearse(world, port, "1:generate:1:kill", TMPDIR=str(tmp_path)) as job:
        job.wait_for_text("rehearsal starts", START_S)
        made = {path.name for path in tmp_path.glob("mindspeed_rl-reward-*")}
        ended = job.end(LIMIT_S)
    assert len(made) == 2, "what there is to remove"
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 1 and left.pop().startswith("torchelastic_"), ended.output
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tidy_temporary_folders(World(0, 1, 0, 1), {})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        pytest.param(signal.SIGINT, "SIGINT from the launcher or its user", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGTERM, "SIGTERM from the launcher or its user", marks=pytest.mark.slow
        ),
        (signal.SIGKILL, "is gone"),
    ],
)
def test_nothing_outlives_the_launcher(
    world: Path, port: int, number: signal.Signals, cause: str
) -> None:
    with rehearse(world, port, "1:generate:1:sleep", fresh=number == signal.SIGKILL) as job:
        job.wait_for_text("rehearsal starts", START_S)
        assert len(processes_of(job.marker)) == 5, "the launcher, two ranks, a worker each"
        os.kill(job.agents[0].pid, number)
        ended = job.end(LIMIT_S)
    told = causes(ended)
    assert len(told) == 1 and cause in told[0], ended.output


@pytest.mark.slow
@pytest.mark.parametrize("fault", KILLED)
def test_a_killed_rank_of_a_real_run(world: Path, port: int, fault: str) -> None:
    rank, phase, *_ = fault.split(":")
    before = shared_memory_left()
    rounds = [
        *flags(600), "--reshard-bucket-mb", "0.25", "--reward-function", "reward.py:differing",
        "--save", f"save-{phase}", "--save-interval", "1",
    ]  # fmt: skip
    real = planted(fault, "train_rl")
    with TorchrunJob(world, [DRIVER], rounds, port=port, environment=real) as job:
        job.wait_for_text("fault planted", START_S)
        ended = job.end(LIMIT_S)
        job.wait_for(lambda: not shared_memory_left() - before, 5.0)
    _only(causes(ended), f"rank {rank} in phase {phase}: process", ended)
    assert "exitcode  : -9" in ended.output, "torchrun's report names the signal"


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("0:reshard:1:flip", r"down_proj\.weight\[3, 5\] on rank 0 "),
        pytest.param(
            "0:reshard:3:drop",
            r"down_proj\.weight\[\d+, \d+\] on rank 0 ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_wrong_weights_never_generate(world: Path, port: int, fault: str, where: str) -> None:
    """A flipped bit, a dropped tensor: all ranks end, with tensor, rank and element."""
    learning = [*flags(600), "--reward-function", "reward.py:differing"]
    real = planted(fault, "train_rl")
    with TorchrunJob(world, [DRIVER], learning, port=port, environment=real) as job:
        job.wait_for_text("fault planted", START_S)
        ended = job.end(LIMIT_S)
    assert all(ended.returncodes), ended.output
    told = r"in phase reshard: .*engine weights differ from the trainer's in 1 tensors: model\."
    _only(causes(ended), "the job ends: rank", ended)
    assert re.search(told + r".*; model\.layers\.1\.mlp\." + where, ended.output), ended.output
    assert ("grpo 1/2" in ended.output) == (":3:" in fault) and "grpo 2/2" not in ended.output


def _only(told: Sequence[str], cause: str, ended: Ended) -> None:
    assert len(told) == 1 and cause in told[0], ended.output
