"""The example of the help is accepted; the quickstart refuses what is wrong at its start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checked_runs import write_model

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.arguments import build_parser, parse
from mindspeed_rl.planning.run_plan import check_rl

ROOT = Path(__file__).resolve().parents[3]
WORLD = 16
# What a pretraining script of this model brings along.
PRETRAINING = ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--bf16"]
QWEN2_5_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "rope_theta": 1000000.0, "max_position_embeddings": 32768, "eos_token_id": 151645,
}  # fmt: skip


def help_flags() -> list[str]:
    """The example at the end of ``--help``, without the pretraining script's own arrays."""
    epilog = build_parser(RLRunConfig, "mindspeed_rl.train_rl").epilog
    assert epilog is not None
    (block,) = re.findall(r"torchrun (.*?)\n\n", epilog, re.DOTALL)
    words: list[str] = block.replace("\\\n", " ").split()
    return words[words.index("--hf-checkpoint") :]


def test_the_example_of_the_help_passes_all_checks(tmp_path, monkeypatch):
    write_model(tmp_path / "model", **QWEN2_5_7B)
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    argv = help_flags()
    argv[argv.index("--hf-checkpoint") + 1] = "model"
    parsed = parse(RLRunConfig, [*PRETRAINING, *argv], "test")
    check_rl(parsed.config, WORLD)
    assert parsed.ignored == ()


def test_a_quickstart_on_several_nodes_needs_a_common_port():
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run(
        ["bash", str(ROOT / "pretrain_scripts" / "quickstart.sh")],
        env=alone | {"NNODES": "2"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert "MASTER_ADDR and MASTER_PORT" in done.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--control", "bogus"], "--rl-control"),
        pytest.param(["--sead", "1"], "--seed", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_flag_ends_the_quickstart_before_data_and_warm_start(tmp_path, wrong, words):
    """With this interpreter instead of the one that setup_env.sh would install."""
    scripts = tmp_path / "pretrain_scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "pretrain_scripts" / "quickstart.sh", scripts)
    for name in ("setup_env.sh", "check_package.sh"):
        (scripts / name).write_text(f"#!/bin/sh\necho {sys.executable}\n")
        (scripts / name).chmod(0o755)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    done = subprocess.run(
        ["bash", str(scripts / "quickstart.sh"), "--output", str(tmp_path / "out"), *wrong],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert "warm start" not in done.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
