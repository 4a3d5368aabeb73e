"""A node is lost for good: the other goes on alone, from the newest checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.jobs import MARKER, ROOT, free_port, planted, processes_of, run_to_end
from support.spawn import run_command
from support.whole_runs import COMMON, comparable_rows, rows_of, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SCRIPT = f'source "{ROOT}/pretrain_scripts/launch.sh"; launch support.rl_driver "$@"'
LIMIT_S = 300.0


def flags(name: str, *more: str) -> list[str]:
    return [
        *COMMON, "--train-iters", "5", "--grpo-prompts-per-step", "4", "--grpo-group-size", "2",
        "--micro-batch-size", "4", "--lr", "1e-3", "--reward-function", "reward.py:digits",
        "--reward-num-workers", "1", "--max-prompt-length", "24", "--vllm-max-num-seqs", "8",
        "--rl-max-logprob-diff", "0", "--rollout-max-response-length", "6",
        "--rollout-kv-cache-gb", "0.0078125", "--use-distributed-optimizer",
        "--output-dir", name, "--save", f"{name}/save", "--save-interval", "2", *more,
    ]  # fmt: skip


def of_node(node: int, port: int) -> dict[str, str]:
    """The environment of a recipe on one of two nodes, which are addresses of this machine."""
    return {
        "NPUS_PER_NODE": "1", "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "NODE_ADDR": f"127.0.0.{node + 1}", "RESTART_BACKOFF_S": "0.1",
        "ELASTIC_WAIT_S": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tools",
    }  # fmt: skip


class Node:
    """A launcher with all that it starts; a context that leaves nothing."""

    def __init__(
        self, folder: Path, node: int, port: int, arguments: Sequence[str], fault: str
    ) -> None:
        self._marker, self._log = uuid.uuid4().hex, folder / f"node{node}.log"
        variables = of_node(node, port) | planted(fault, "train_rl") | {MARKER: self._marker}
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                ["bash", "-euc", SCRIPT, "launch", *arguments], cwd=folder,
                env=os.environ | variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End its launcher and its ranks as the loss of a machine does."""
        for pid in processes_of(self._marker):
            os.kill(pid, signal.SIGKILL)
        self._launcher.wait()

    def told(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Return when it has said a text; an ``AssertionError`` when it ends without."""
        end = time.monotonic() + LIMIT_S
        while text not in self.told():
            alive = self._launcher.poll() is None and time.monotonic() < end
            assert alive or text in self.told(), self.told()
            time.sleep(0.1)

    def code(self) -> int:
        """Wait for its end and return its exit code."""
        return self._launcher.wait(LIMIT_S)


def test_the_node_that_is_left_goes_on_as_a_job_of_one_node(tmp_path: Path) -> None:
    """Its steps are those of such a job that resumes the same checkpoint, to the bit.

    The first node is lost, which held the store.
    """
    write_inputs(tmp_path, 16)
    port = free_port()
    given = flags("out", "--max-restarts", "2", "--elastic-min-nodes", "1")
    fault = "0:train:3:sleep"
    with (
        Node(tmp_path, 0, port, given, fault) as gone,
        Node(tmp_path, 1, port, given, fault) as left,
    ):
        gone.wait_for("fault planted")
        gone.kill()
        assert left.code() == 0, left.told()
        told = left.told()
    assert "attempt 1 runs on 2 of 2 nodes, 2 ranks" in told
    assert "attempt 2 runs on 1 of 2 nodes (without node 0), 1 rank" in told
    assert "resuming after step 2 from out/save/iter_0000002" in told
    shutil.copytree(tmp_path / "out/save/iter_0000002", tmp_path / "from/iter_0000002")
    run_command("mindspeed_rl.train_rl", flags("alone", "--load", "from"), 1, cwd=tmp_path)
    found = comparable_rows(tmp_path / "out")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[2:] == comparable_rows(tmp_path / "alone")
    rows = rows_of(tmp_path / "out")
    counts = [[row.get(f"run/{name}") for name in ("restarts", "nodes")] for row in rows]
    assert counts == [[None, None]] * 2 + [[1.0, 1.0]] * 3


def test_a_node_that_is_started_again_joins_the_restart_of_the_others(tmp_path: Path) -> None:
    """Without --elastic-min-nodes; its new starter knows of no failure, and --load is not given."""
    write_inputs(tmp_path, 16)
    run_command("mindspeed_rl.train_rl", flags("quiet"), 2, cwd=tmp_path)
    port = free_port()
    given = flags("out", "--max-restarts", "2")
    with ExitStack() as stack:
        left = stack.enter_context(Node(tmp_path, 0, port, given, ""))
        gone = stack.enter_context(Node(tmp_path, 1, port, given, "1:train:3:sleep"))
        gone.wait_for("fault planted")
        gone.kill()
        back = stack.enter_context(Node(tmp_path, 1, port, given, ""))
        assert left.code() == 0, left.told() + back.told()
        assert back.code() == 0, back.told()
    assert "resuming after step 2 from out/save/iter_0000002" in left.told()
    assert comparable_rows(tmp_path / "out") == comparable_rows(tmp_path / "quiet")


def test_a_layout_that_needs_all_nodes_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_inputs(tmp_path, 16)
    given = flags("out", "--tensor-model-parallel-size", "2", "--elastic-min-nodes", "1")
    command = ["bash", "-euc", SCRIPT, "launch", *given]
    variables = of_node(1, free_port()) | planted("", "train_rl")
    no_restarts = run_to_end(command, 60.0, variables, cwd=tmp_path)
    assert no_restarts.returncode == 2 and "add --max-restarts" in no_restarts.stdout
    refused = run_to_end([*command, "--max-restarts", "1"], 60.0, variables, cwd=tmp_path)
    assert refused.returncode == 2
    assert "--elastic-min-nodes 1: with 1 node (1 rank) it cannot run: " in refused.stdout
    assert "--tensor-model-parallel-size 2" in refused.stdout
    assert not (tmp_path / "out").exists()
