"""Two torchrun agents give the numbers of four ranks without an agent.

Real megatron-core and real vLLM: a pipeline stage per node, so that gradients, samples and weights
cross. What an agent writes lands in a directory of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import TorchrunJob
from support.spawn import run_command
from support.whole_runs import COMMON, TRAIN_RL, comparable_rows, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_RANKS = 4
LIMIT_S = 400.0
FLAGS = [
    *COMMON, "--pipeline-model-parallel-size", "2",
    "--use-distributed-optimizer", "--rollout-tp", "2",
    "--train-iters", "2", "--grpo-prompts-per-step", "4", "--grpo-group-size", "2",
    "--micro-batch-size", "4", "--lr", "1e-3", "--reward-function", "reward.py:differing",
    "--reward-num-workers", "1", "--max-prompt-length", "24", "--vllm-max-num-seqs", "8",
    "--rollout-max-response-length", "6",
]  # fmt: skip
# Which of the ranks with the same weights sends them, and which ways the samples take.
BY_NODE = ("reshard/bytes_sent", "exchange/sent_bytes", "exchange/collectives")


def run_agents(folder: Path) -> list[Path]:
    """The output directories of two agents."""
    names = ["first", "second"]
    with TorchrunJob(
        folder, TRAIN_RL, FLAGS, num_ranks=NUM_RANKS // 2, num_nodes=2,
        node_flags=[["--output-dir", name] for name in names],
    ) as job:  # fmt: skip
        ended = job.end(LIMIT_S)
    assert not any(ended.returncodes), ended.output
    return [folder / name for name in names]


def test_two_agents_give_the_numbers_of_one_world(tmp_path: Path) -> None:
    write_inputs(tmp_path, 16)
    alone = tmp_path / "alone"
    run_command(TRAIN_RL[1], [*FLAGS, "--output-dir", "alone"], NUM_RANKS, cwd=tmp_path)
    first, second = run_agents(tmp_path)
    expected, found = comparable_rows(alone, BY_NODE), comparable_rows(first, BY_NODE)
    assert [record["step"] for record in found] == [1, 2]
    assert found[1]["optimizer/grad_norm"] > 0
    assert found == expected
    sums = [
        json.loads((output / "summary.json").read_text())["parameters_abs_sum"]
        for output in (alone, first)
    ]
    assert sums[0] == sums[1] > 0
    assert not (second / "metrics.jsonl").exists(), "one rank of the job writes"
