"""Every block of bash in the README and the docs is executed, or listed with the reason.

Those that are marked run as they stand; the others with a reader's own paths and flags filled in,
their runs predicted instead of started. docs/index.md says how to mark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from make_tiny_model import write_tiny_model
from pyarrow import parquet
from support.architecture import ROOT
from support.conversions import hf_to_mg, quantise, write_model
from support.documented import calls_of, execute
from support.pages import ALL, NOT_RUN, Block, Run, python_files
from support.published import PUBLISHED


def write_checkout(data: Path, folder: Path) -> None:
    """The reader's data in a checkout of this repository."""
    shutil.copytree(data, folder, dirs_exist_ok=True)
    for name in ("pretrain_scripts", "tools", "docs", "mindspeed_rl", "tests"):
        (folder / name).symlink_to(ROOT / name)


def parameters(blocks: Iterable[Block]) -> list[Any]:
    """Blocks as parameters of a test."""
    return [
        pytest.param(block, id=block.name, marks=() if block.quick else pytest.mark.slow)
        for block in blocks
    ]


def once(how: Run) -> list[Any]:
    """Blocks that run like this, each text once; the README's before those of other pages."""
    seen = {block.words: block for block in reversed(ALL) if block.run is how}
    return parameters(sorted(seen.values(), key=lambda block: block.name))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a reader in an environment that is installed: python is ours."""
    folder = tmp_path_factory.mktemp("bin")
    # no links: a virtual environment is found beside its interpreter
    programs = {
        "python": "",
        "torchrun": "-m torch.distributed.run",
        "mindspeed-rl": "-c 'from mindspeed_rl.cli import main; main()'",
    }
    for name, target in programs.items():
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


@pytest.mark.parametrize("block", once(Run.AS_IT_STANDS))
def test_blocks_that_are_marked_run(
    block: Block,
    reader: dict[str, str],
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    write_checkout(data, tmp_path)
    if re.search(r"DIR|Qwen2\.5-7B", block.text):  # seconds, which few blocks need
        shutil.copytree(request.getfixturevalue("models"), tmp_path, dirs_exist_ok=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env=reader,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def write_readers_things(block: Block, data: Path, folder: Path) -> None:
    """Under the names of the pages: configs of published models, weights where some are read."""
    write_checkout(data, folder)
    configs = {"Qwen2.5-7B-Instruct": "qwen2.5-7b", "Qwen2.5-Math-7B-Instruct": "qwen2.5-7b",
               "Qwen2.5-Coder-7B-Instruct": "qwen2.5-7b", "Qwen3-30B-A3B": "qwen3-30b-a3b",
               "Qwen3-235B-A22B": "qwen3-235b-a22b", "DeepSeek-R1-bf16": "deepseek-v3"}  # fmt: skip
    for name, config in configs.items():
        if "convert" not in block.text and "--doctor" not in block.text:  # not yet downloaded
            (folder / "models" / name).mkdir(parents=True)
            shutil.copy(PUBLISHED[config], folder / "models" / name / "config.json")
    (folder / "my").mkdir()
    for page in ("extending.md", "agents.md"):
        for name, text in python_files(page).items():
            if name.startswith("my/"):
                (folder / name).write_text(text)
    if "DeepSeek-R1" in block.text and "convert" in block.text:
        quantise(write_model("deepseek", folder / "bf16"), folder / "DeepSeek-R1")
        (folder / "models").mkdir()
        (folder / "models/DeepSeek-R1").symlink_to(folder / "DeepSeek-R1")
    if "outputs/run/checkpoints" in block.text:
        write_model("qwen2-tied", folder / "Qwen2.5-7B")
        hf_to_mg(folder / "Qwen2.5-7B", folder / "outputs/run/checkpoints",
                 ["--ckpt-format", "torch_dist"])  # fmt: skip


@pytest.mark.parametrize("block", once(Run.FILLED_IN))
def test_all_other_blocks_run_with_what_is_the_readers_filled_in(
    block: Block,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_readers_things(block, data, tmp_path)
    monkeypatch.chdir(tmp_path)
    calls = calls_of(block, tmp_path)
    assert calls, "nothing of it is ours: add it to NOT_RUN of pages.py"
    for words in calls:
        predicted = any("train_rl" in word for word in words)  # a dry run needs no device
        device = "--platform" in words and words[words.index("--platform") + 1] != "cpu"
        device = device and not predicted
        code = execute(words, monkeypatch)
        printed = capsys.readouterr()
        assert code == int(device), f"{words}\n{printed.out[-2000:]}{printed.err}"
        assert not device or "RED" in printed.out


def test_every_reason_is_about_a_block() -> None:
    left = [block for block in ALL if block.run is Run.NEVER]
    for begins in NOT_RUN:
        assert any(block.text.startswith(begins) for block in left), f"no block begins {begins}"
    assert len(left) < len(ALL) / 4
