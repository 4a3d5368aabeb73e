"""Whole runs of train_rl on a tiny model: what they read, and the metrics that they write."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from make_task_data import generate_task, write_jsonl
from make_tiny_model import write_tiny_model
from support.jobs import DRIVER, Ended, TorchrunJob, planted
from support.spawn import run_command

from mindspeed_rl.metrics.equality import computed

TRAIN_RL = ("-m", "mindspeed_rl.train_rl")
COMMON = (
    *("--hf-checkpoint", "model", "--platform", "cpu", "--prompt-data", "train.jsonl"),
    *("--make-vocab-size-divisible-by", "8"),
)
# Of an untrained model: the share of digits, which it can learn without a warm start, and anything
# that differs within a group.
REWARDS = """
import zlib


def digits(request):
    return sum(c.isdigit() for c in request.response) / (1 + len(request.response))


def differing(request):
    return zlib.crc32(request.response.encode()) % 8 / 8
"""


def write_inputs(
    folder: Path, num_prompts: int, *, heldout: int = 0, family: str = "qwen2"
) -> Path:
    """The folder with ``model``, ``train.jsonl``, ``reward.py`` and ``heldout.jsonl`` if asked."""
    write_tiny_model(folder / "model", family=family)
    write_jsonl(folder / "train.jsonl", generate_task("digit_sort", num_prompts, seed=0))
    if heldout:
        rows = generate_task("digit_sort", heldout, seed=0, split="heldout")
        write_jsonl(folder / "heldout.jsonl", rows)
    (folder / "reward.py").write_text(REWARDS)
    return folder


def rows_of(output: Path) -> list[dict[str, Any]]:
    """The metrics of a run, evaluations included."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def comparable_rows(output: Path, left_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """The metrics of a run, without those that measure the machine instead of the run."""
    return [
        {name: value for name, value in computed(row).items() if name not in left_out}
        for row in rows_of(output)
    ]


def run_entry(
    folder: Path,
    flags: Sequence[str],
    *,
    entry: str = "train_rl",
    num_ranks: int = 2,
    fault: str = "",
    limit_s: float = 300.0,
) -> Ended:
    """A job of torchrun in ``folder``, to its end.

    With a fault it is the entry of ``support/rl_driver.py``, which says what a fault is.
    """
    target = [DRIVER] if fault else ["-m", f"mindspeed_rl.{entry}"]
    with TorchrunJob(
        folder,
        target,
        flags,
        num_ranks=num_ranks,
        environment=planted(fault, entry),
    ) as job:
        ended = job.end(limit_s)
    assert not fault or "fault planted" in ended.output, ended.output
    return ended


def warm_run(
    folder: Path,
    flags: Sequence[str],
    *,
    output: str = "out",
    num_ranks: int = 2,
    fault: str = "",
    limit_s: float = 300.0,
) -> str:
    """What rank 0 of a run in ``folder`` printed, which must end well.

    Its ranks need not import the libraries, and are not torchrun's. A fault as in
    :func:`run_entry`, of the kind that a run survives.
    """
    argv = [*COMMON, "--output-dir", output, *flags]
    module, variables = TRAIN_RL[1], {}
    if fault:
        module, variables = "support.rl_driver", planted(fault, "train_rl")
    with mock.patch.dict(os.environ, variables):
        told = run_command(module, argv, num_ranks, cwd=folder, timeout_s=limit_s)
    assert "the job ends" not in told, told
    return told


def train_rl(
    folder: Path,
    flags: Sequence[str],
    *,
    output: str = "out",
    num_ranks: int = 2,
    limit_s: float = 300.0,
) -> list[dict[str, Any]]:
    """The metrics of every step of a :func:`warm_run`."""
    warm_run(folder, flags, output=output, num_ranks=num_ranks, limit_s=limit_s)
    return [row for row in rows_of(folder / output) if "optimizer/skipped" in row]
