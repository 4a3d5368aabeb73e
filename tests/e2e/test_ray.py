"""A run in Ray: the same numbers as under torchrun, ended by any failure with its cause.

Needs the extra ray; skipped where it is not installed. A cluster of two nodes on this machine is
started once; small runs (tests/support/rl_driver.py) join it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare_runs import differences, digests, metrics
from support.jobs import DRIVER, MARKER, ROOT, TorchrunJob, planted, processes_of
from support.whole_runs import COMMON, TRAIN_RL, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REHEARSAL = [sys.executable, DRIVER]
ENTRY = [sys.executable, *TRAIN_RL]
LIMIT_S = 400.0  # on a busy machine
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
    write_inputs(folder, 16)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "echo.py").write_text(ENVIRONMENT)
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster of two nodes with room for a rank each."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RAY_worker_niceness", "0")  # as in a local Ray of the driver
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        cluster.add_node(**node)
        yield cluster.address
        cluster.shutdown()


def flags(output: str) -> list[str]:
    return [
        *COMMON, "--pipeline-model-parallel-size", "2",
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
        *REHEARSAL, *flags("rehearsal"), "--orchestrator", "ray", "--ray-address", address,
        "--ray-num-nodes", "2", "--ray-ranks-per-node", "1",
    ]  # fmt: skip


def wait_until_gone(marker: str) -> None:
    """Nothing of a job is left; pytest-timeout ends the test where something stays."""
    while not all(map(is_agent, processes_of(marker))):
        time.sleep(0.2)


def nodes_of_drivers(address: str) -> set[str]:
    """Return the nodes to which the drivers of a cluster are connected."""
    from ray._raylet import GcsClient  # type: ignore[import-not-found]

    jobs = GcsClient(address=address).get_all_job_info().values()
    return {job.driver_address.node_id.hex() for job in jobs}


def is_agent(pid: int) -> bool:
    """Ray's own agents of a node hold nothing and notice the end of a killed driver late."""
    try:
        return b"/agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return True


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("1:train:2:raise", 1, "the job ends: rank 1 in phase train: RuntimeError: planted fault"),
        ("1:exchange:2:kill", 1, "the job ends: rank 1 in phase exchange: process "),
        ("1:train:2:stop", 1, "rank 1 in phase train: no heartbeat for"),
        ("1:train:2:mistake", 2, "error: --lr 7: too large"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_cause(
    folder: Path, address: str, fault: str, code: int, cause: str
) -> None:
    """The ranks are on two nodes; the peer of the one that fails is inside a collective."""
    marker = f"ray-{os.getpid()}-{fault}"
    limits = ["--phase-timeout-s", "300", "--reward-timeout-s", "3"]
    ended = run(folder, [*joining(address), *limits], **planted(fault), **{MARKER: marker})
    output = ended.stdout + ended.stderr
    assert ended.returncode == code and "fault planted" in output, output
    told = [line for line in output.splitlines() if "rl_driver: " in line]
    assert len(told) == 1 and told[0].startswith("support.rl_driver: ") and cause in told[0], output
    assert ("in _raise" in output) == ("raise" in fault), "the traceback of an exception alone"
    assert ("stacks of rank 0:" in output) == fault.endswith("stop")
    wait_until_gone(marker)


def test_a_job_goes_on_without_a_node_that_is_lost(folder: Path) -> None:
    """Its ranks are killed with the node; the next attempt has one rank.

    The driver joins any of the three nodes, and the one that is lost is another.
    """
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
    head = node | {"include_dashboard": False, "num_cpus": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(**node) for _ in range(2)]
    own = flags("elastic")
    at = own.index("--pipeline-model-parallel-size")
    command = [
        *REHEARSAL, *own[:at], *own[at + 2 :], "--orchestrator", "ray",
        "--ray-address", cluster.address, "--ray-num-nodes", "2", "--ray-ranks-per-node", "1",
        "--max-restarts", "2", "--restart-backoff-s", "0.1", "--elastic-min-nodes", "1",
        "--elastic-wait-s", "1",
    ]  # fmt: skip
    marker, log = f"ray-elastic-{os.getpid()}", folder / "elastic.log"
    variables = environment(**planted("1:train:2:sleep"), **{MARKER: marker}, PYTHONUNBUFFERED="1")
    with log.open("w") as out:
        driver = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out)
    try:
        while "fault planted" not in log.read_text():
            assert driver.poll() is None, log.read_text()
            time.sleep(0.2)
        drivers = nodes_of_drivers(cluster.address)
        lost = next(node for node in nodes if node.node_id not in drivers)
        cluster.remove_node(lost, allow_graceful=False)
        assert driver.wait(LIMIT_S) == 0, log.read_text()
    finally:
        driver.kill()
        driver.wait()
        cluster.shutdown()
    told = log.read_text()
    assert "attempt 2 runs on 1 of 2 nodes, 1 rank\n" in told, told
    assert told.count("rehearsal starts") == 2
    wait_until_gone(marker)


def test_a_run_in_ray_equals_that_of_torchrun_bit_for_bit(folder: Path) -> None:
    """The real entry in a local Ray, rewards and environments in its actors; nothing stays."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    talk = ["--rl-environment", "echo.py:Echo"]
    talk += ["--rl-environment-threads", "0"]  # turns join the same turns in both
    talk += ["--reward-function", "environment", "rewards.py:length"]
    with TorchrunJob(folder, TRAIN_RL, [*flags("torchrun"), *talk]) as job:
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
    wait_until_gone(marker)


def test_nothing_outlives_the_driver(folder: Path) -> None:
    """A local Ray, its processes and the ranks end when the driver is killed."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    marker = f"ray-killed-{os.getpid()}"
    command = [*REHEARSAL, *flags("killed"), "--orchestrator", "ray", "--ray-ranks-per-node", "2"]
    variables = environment(**planted("1:train:2:sleep"), PYTHONUNBUFFERED="1", **{MARKER: marker})
    with (folder / "killed.log").open("w") as log:
        driver = subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
    try:
        while "fault planted" not in (folder / "killed.log").read_text():
            assert driver.poll() is None
            time.sleep(0.2)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until_gone(marker)
