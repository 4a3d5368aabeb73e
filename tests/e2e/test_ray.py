"""A run in Ray: the same as under torchrun, ended by any failure with its cause.

Needs the extra ray; skipped where it is not installed. A cluster of two nodes on this machine is
started once; small runs (tests/support/ray_driver.py) join it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.jobs import MARKER, ROOT, TorchrunJob, free_port, processes_of

sys.path.insert(0, str(ROOT / "tools"))
from compare_runs import differences, digests, metrics
from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DRIVER = [sys.executable, str(ROOT / "tests" / "support" / "ray_driver.py")]
ENTRY = [sys.executable, "-m", "mindspeed_rl.train_rl"]
LIMIT_S = 150.0
REWARD = "def length(request):\n    return request.num_response_tokens / 6\n"
ENVIRONMENT = """
from mindspeed_rl.environments import Observation


class Echo:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.said = []

    def reset(self, prompt):
        return Observation(tuple(self.tokenizer.encode("go")))

    def step(self, token_ids):
        self.said += token_ids
        return Observation(token_ids[:1], done=len(self.said) > 4, reward=len(set(self.said)) / 8)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts and a reward."""
    folder = tmp_path_factory.mktemp("ray")
    write_tiny_model(folder / "model")
    write_jsonl(folder / "train.jsonl", generate_task("digit_sort", 16, seed=0))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "echo.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of two nodes with room for a rank each, and one more."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    yield cluster.address
    cluster.shutdown()


def flags(output: str) -> list[str]:
    return [
        "--hf-checkpoint", "model", "--platform", "cpu", "--prompt-data", "train.jsonl",
        "--pipeline-model-parallel-size", "2", "--make-vocab-size-divisible-by", "8",
        "--train-iters", "2", "--grpo-prompts-per-step", "4", "--grpo-group-size", "2",
        "--micro-batch-size", "4", "--lr", "1e-3", "--reward-function", "rewards.py:length",
        "--max-prompt-length", "24", "--vllm-max-num-seqs", "8", "--seed", "3",
        "--rollout-max-response-length", "6", "--output-dir", output, "--overwrite-output-dir",
        "--rollout-kv-cache-gb", "0.0078125", "--vllm-block-size", "32",
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | more


def run(folder: Path, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip


def joining(address: str) -> list[str]:
    return [
        *DRIVER, *flags("rehearsal"), "--orchestrator", "ray", "--ray-address", address,
        "--ray-num-nodes", "2", "--ray-ranks-per-node", "1",
    ]  # fmt: skip


def test_two_nodes_are_driven_by_small_messages(folder: Path, address: str) -> None:
    """Of two steps: three messages for each of four stages, none of 256 bytes.

    That any number of samples takes messages of the same size: tests/unit/test_ray_control.py.
    """
    ended = run(folder, [*joining(address), "--rollout-max-response-length", "60"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "ranks 2" in ended.stdout and "scored 1" in ended.stdout
    found = re.search(
        r"control by Ray: (\d+) stages, (\d+) messages of at most (\d+)", ended.stdout
    )
    assert found is not None, ended.stdout
    stages, messages, largest = map(int, found.groups())
    assert (stages, messages) == (4, 4 * (1 + 2)) and largest < 256


def test_an_exception_of_a_rank_ends_the_run_with_its_traceback(folder: Path, address: str) -> None:
    """Its peer, on another node, is inside a collective."""
    ended = run(folder, joining(address), MINDSPEED_RL_TEST_FAULT="1:train:2:raise")
    assert ended.returncode == 1
    assert ended.stderr.count("RuntimeError: planted fault") >= 2, (
        "in the traceback and in the line"
    )
    assert ", in _raise\n" in ended.stderr
    last = "ray_driver: the job ends: rank 1 in phase train: RuntimeError: planted fault"
    assert last in ended.stderr.splitlines()


def test_a_killed_rank_is_named_with_what_it_did(folder: Path, address: str) -> None:
    ended = run(folder, joining(address), MINDSPEED_RL_TEST_FAULT="1:rollout:2:kill")
    assert ended.returncode == 1
    assert "the job ends: rank 1 is gone (rollout in step 2)" in ended.stderr
    assert "worker process has died" in ended.stderr, "what Ray knows about it"


@pytest.mark.parametrize(
    ("fault", "timeout_s", "cause", "dumped"),
    [
        ("1:train:2:sleep", "6", "exceeded --phase-timeout-s 6 ", (0, 1)),
        ("1:train:2:stop", "60", "rank 1 in phase train: no heartbeat for 5 s", (0,)),
    ],
    ids=["sleeps", "is-stopped"],
)
def test_a_rank_that_hangs_ends_the_run_with_all_stacks(
    folder: Path, address: str, fault: str, timeout_s: str, cause: str, dumped: tuple[int, ...]
) -> None:
    """One that sleeps in Python reads of its deadline; one that is stopped answers nobody."""
    marker = f"ray-hang-{os.getpid()}-{fault[-4:]}"
    ended = run(
        folder, [*joining(address), "--phase-timeout-s", timeout_s, "--reward-timeout-s", "3"],
        MINDSPEED_RL_TEST_FAULT=fault, **{MARKER: marker},
    )  # fmt: skip
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1 and "fault planted" in output, output
    told = [line for line in ended.stderr.splitlines() if line.startswith("ray_driver: the job")]
    assert len(told) == 1 and cause in told[0], output
    for rank in dumped:
        assert f"stacks of rank {rank}:" in output, output
    if len(dumped) > 1:
        assert "train for 6 s: rank 0-1" in told[0], "where the ranks are"
        assert re.search(r'ray_driver\.py", line \d+ in (<lambda>|rehearsal)', output), output
    deadline = time.monotonic() + 15.0
    while left := processes_of(marker):
        assert time.monotonic() < deadline, f"left in the cluster that was joined: {left}"
        time.sleep(0.2)


def test_a_run_in_ray_equals_that_of_torchrun_bit_for_bit(folder: Path) -> None:
    """The real entry in a local Ray, rewards and environments in its actors; nothing stays."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    talk = ["--rl-environment", "echo.py:Echo"]
    talk += ["--reward-function", "environment", "rewards.py:length"]
    target = ("-m", "mindspeed_rl.train_rl")
    with TorchrunJob(folder, target, [*flags("torchrun"), *talk], port=free_port()) as job:
        ended = job.end(LIMIT_S)
        assert ended.returncodes == (0,), ended.output
    marker = f"ray-{os.getpid()}"
    in_ray = run(
        folder,
        [*ENTRY, *flags("ray"), *talk, "--orchestrator", "ray", "--ray-ranks-per-node", "2",
         "--rl-environment-ray-workers", "2"],
        **{MARKER: marker},
    )  # fmt: skip
    assert in_ray.returncode == 0, in_ray.stdout + in_ray.stderr
    assert list(differences(folder / "torchrun", folder / "ray")) == []
    rows = metrics(folder / "ray")
    assert len(rows) == 2 and "environment/observed_tokens" in rows[0]
    assert digests(folder / "ray" / "hf")
    deadline = time.monotonic() + 10.0
    while left := processes_of(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_the_quickstart_in_ray_is_that_of_torchrun_bit_for_bit(tmp_path: Path) -> None:
    """The script with fewer steps: four ranks of TP2 x PP2, its own warm start, and all it does."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    scripts = tmp_path / "pretrain_scripts"
    scripts.mkdir()
    for name in ("quickstart.sh", "rewards_digit_sort.py"):
        shutil.copy(ROOT / "pretrain_scripts" / name, scripts)
    for name in ("setup_env.sh", "check_package.sh"):  # this interpreter
        (scripts / name).write_text(f"#!/bin/sh\necho {sys.executable}\n")
        (scripts / name).chmod(0o755)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    fewer = ["--train-iters", "3", "--eval-interval", "3", "--log-interval", "1"]
    for output, more in (("torchrun", []), ("ray", ["--orchestrator", "ray"])):
        command = ["bash", str(scripts / "quickstart.sh"), "--output", str(tmp_path / output)]
        ended = run(tmp_path, [*command, *fewer, *more])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ("control by Ray" in ended.stdout) == (output == "ray")
    assert list(differences(tmp_path / "torchrun" / "rl", tmp_path / "ray" / "rl")) == []
    assert metrics(tmp_path / "ray" / "rl") and digests(tmp_path / "ray" / "rl" / "hf")
