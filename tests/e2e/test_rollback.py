"""A run that goes back to its own checkpoint, and then does what a fresh start from there does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_task_data import generate_task
from support.whole_runs import comparable_rows, rows_of, warm_run, write_inputs

from mindspeed_rl.core.digest import text_digest
from mindspeed_rl.data.sampler import epoch_order

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPTS, PER_STEP, SEED = 24, 4, 3
FLAGS = [
    "--reward-function", "spikes.py:spikes", "--rl-advantage-estimator", "dr_grpo",
    "--rl-alarms", "nonfinite=rollback", "--train-iters", "5", "--save-interval", "1",
    "--grpo-prompts-per-step", str(PER_STEP), "--grpo-group-size", "4", "--micro-batch-size", "4",
    "--max-prompt-length", "24", "--rollout-max-response-length", "6", "--seed", str(SEED),
    "--vllm-max-num-seqs", "16", "--log-rollouts", "4", "--use-distributed-optimizer",
    "--rl-max-logprob-diff", "0", "--lr", "1e-3", "--lr-decay-style", "linear",
]  # fmt: skip
SPIKES = """
import zlib


def spikes(request):
    if request.answer == {answer!r} and request.sample_id % 2:
        return 3e38
    return zlib.crc32(request.response.encode()) % 8 / 8
"""


def write_spikes(folder: Path, step: int) -> None:
    """A reward that is far too large for one prompt of a step."""
    order = epoch_order(PROMPTS, SEED, 0, True)
    rows = list(generate_task("digit_sort", PROMPTS, seed=0))
    answer = str(rows[order[(step - 1) * PER_STEP]]["answer"])
    (folder / "spikes.py").write_text(SPIKES.format(answer=answer))


def passed_over(save: Path, step: int, position: int) -> None:
    """Leave the checkpoint of ``step`` alone, with the sampler at another place of its epoch."""
    for path in save.glob("iter_*"):
        if path.name != f"iter_{step:07d}":
            shutil.rmtree(path)
    record = save / f"iter_{step:07d}" / "checkpoint.json"
    body = record.read_text().split("\n", 2)[2]
    body, count = re.subn(r'("position": )\d+', rf"\g<1>{position}", body)
    assert count == 1
    record.write_text(f'{{\n "record_xxh3": "{text_digest(body)}",\n{body}')


def without_rollbacks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "run/rollbacks"} for row in rows]


def test_a_run_goes_back_and_trains_on_other_prompts(tmp_path: Path) -> None:
    """Its third step is done again as by a fresh start from the checkpoint of the second."""
    write_inputs(tmp_path, PROMPTS)
    write_spikes(tmp_path, 3)
    said = warm_run(tmp_path, [*FLAGS, "--save", "back/save", "--async-save"], output="back")
    assert said.count("back to step 2; the prompts since then are passed over") == 1
    assert "step 3: alarm nonfinite: optimizer/grad_norm is inf" in said
    rows = comparable_rows(tmp_path / "back")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    counts = [row.get("run/rollbacks", 0.0) for row in rows_of(tmp_path / "back")]
    assert counts == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert all(row["optimizer/grad_norm"] < 100 for row in rows)
    last = json.loads((tmp_path / "back/save/iter_0000005/checkpoint.json").read_text())
    assert last["extra"]["rollbacks"] == [2] and last["num_updates"] == 5

    shutil.copytree(tmp_path / "back", tmp_path / "fresh")
    passed_over(tmp_path / "fresh/save", 2, 3 * PER_STEP)
    warm_run(tmp_path, [*FLAGS, "--save", "fresh/save", "--load", "fresh/save"], output="fresh")
    assert comparable_rows(tmp_path / "fresh") == without_rollbacks(rows)
    dumps = [(tmp_path / run / "rollouts.jsonl").read_text() for run in ("back", "fresh")]
    assert dumps[0] == dumps[1] and len(dumps[0].splitlines()) == 5 * 4
    weights = [
        json.loads((tmp_path / run / "summary.json").read_text())["parameters_abs_sum"]
        for run in ("back", "fresh")
    ]
    assert weights[0] == weights[1]
