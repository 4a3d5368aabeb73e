"""Blocks of bash in the README and the docs that are marked run as they stand (issue 9).

The rest is checked without running it: tests/unit/test_docs.py. docs/index.md says how to mark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from support.architecture import ROOT
from support.pages import ALL, Block, Run
from support.published import PUBLISHED

from mindspeed_rl.data.tiny_model import write_tiny_model


def executed() -> list[Any]:
    """Blocks to run, each text once, as parameters."""
    seen = {block.words: block for block in reversed(ALL) if block.run is not Run.NEVER}
    in_turns = {Run.ALWAYS: [], Run.IN_TURNS: [pytest.mark.slow("each")]}
    return [
        pytest.param(block, id=block.name, marks=in_turns[block.run])
        for block in sorted(seen.values(), key=lambda block: block.name)
    ]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a reader in an environment that is installed: python is ours."""
    folder = tmp_path_factory.mktemp("bin")
    # no links: a virtual environment is found beside its interpreter
    for name, target in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {target} "$@"\n')
        (folder / name).chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small things under the names that pages give to the reader's data."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "DeepSeek-V3").mkdir()
    shutil.copy(PUBLISHED["deepseek-v3"], folder / "DeepSeek-V3" / "config.json")
    sums = [(f"{i} + {i}?", str(2 * i)) for i in range(800)]
    rows = [{"problem": question, "answer": answer} for question, answer in sums]
    (folder / "deepscaler.json").write_text(json.dumps(rows))
    solved = [{"question": question, "answer": f"#### {answer}"} for question, answer in sums]
    parquet.write_table(pyarrow.Table.from_pylist(solved), folder / "train-00000-of-00001.parquet")
    steps = [{"step": i, "reward/mean": 0.1 * i, "time/step_s": 1.0} for i in range(1, 4)]
    for name in ("outputs", "outputs/quickstart/seed0/rl"):
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and tokens to score, under the names of the pages."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "DIR", hidden_size=128, num_heads=4, num_kv_heads=4)
    shutil.copytree(folder / "DIR", folder / "Qwen2.5-7B")
    tokens = np.random.default_rng(0).integers(0, 307, (3, 16))
    np.savez(folder / "in.npz", tokens=tokens, length=np.array([16, 9, 2]))
    return folder


@pytest.mark.parametrize("block", executed())
def test_blocks_that_are_marked_run(
    block: Block,
    reader: dict[str, str],
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    if re.search(r"DIR|Qwen2\.5-7B", block.text):  # seconds, which few blocks need
        shutil.copytree(request.getfixturevalue("models"), tmp_path, dirs_exist_ok=True)
    for name in ("pretrain_scripts", "tools", "docs", "mindspeed_rl", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env=reader,
        capture_output=True, text=True, timeout=60 if block.run is Run.ALWAYS else 240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_some_blocks_are_executed() -> None:
    assert len(executed()) >= 12
