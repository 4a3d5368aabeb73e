"""A node whose ranks never join the process group ends the others, too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.jobs import TorchrunJob
from support.whole_runs import write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_S = 300.0  # the process group alone would wait an hour
FLAGS = ["--hf-checkpoint", "model", "--platform", "cpu", "--train-iters", "2",
         "--global-batch-size", "2", "--make-vocab-size-divisible-by", "8"]  # fmt: skip


@pytest.mark.parametrize("missing_on", [0, 1])
def test_a_file_that_one_node_lacks_ends_all_nodes(tmp_path: Path, missing_on: int) -> None:
    """The node that has the file waits for the other one to join."""
    write_inputs(tmp_path, 16)
    data = [["--sft-data", "train.jsonl"], ["--sft-data", "train.jsonl"]]
    data[missing_on] = ["--sft-data", "elsewhere.jsonl"]
    outputs: list[Sequence[str]] = [
        [*flags, "--output-dir", f"out{node}"] for node, flags in enumerate(data)
    ]
    with TorchrunJob(
        tmp_path, ["-m", "mindspeed_rl.pretrain"], FLAGS, num_ranks=1, num_nodes=2,
        node_flags=outputs,
    ) as job:  # fmt: skip
        ended = job.end(LIMIT_S)
    assert all(ended.returncodes), ended.output
    errors = re.findall(r"^mindspeed_rl\.pretrain: error: (.*)$", ended.output, re.MULTILINE)
    assert len(errors) == 2, ended.output
    assert all(error.startswith("--sft-data elsewhere.jsonl: ") for error in errors), errors
    assert "Traceback" not in ended.output.partition(errors[0])[0]
    assert "exitcode  : 2" in ended.output
