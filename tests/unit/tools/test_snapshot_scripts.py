"""Flags of a shell script, read without starting anything that it names."""

import json
import subprocess
from pathlib import Path

import pytest
from snapshot_scripts import ScriptFolders, as_flags, read_script, snapshot

SCRIPT = """#!/bin/bash
source /usr/local/Ascend/set_env.sh
touch FOLDER/touched
/usr/bin/touch FOLDER/started
echo x > FOLDER/written
CKPT_LOAD_DIR="your model ckpt path"
DATA_PATH=./corpus
TP=4
NPUS_PER_NODE=8
NNODES=3
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $NNODES \\
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \\
    --bf16 \\
    --spec some.module layer_spec \\
    --seed 5
"
python tools/prepare --not-this
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    $GPT_ARGS --seed=7 --data-path $DATA_PATH --cache /home/me/cache \\
    --load ${CKPT_LOAD_DIR} | tee logs/train.log
"""


def test_flags_values_and_ranks_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = tmp_path / "run" / "pretrain_x.sh"
    script.write_text(SCRIPT.replace("FOLDER", str(tmp_path)))
    assert read_script(script) == {
        "ranks": 24,
        "flags": {
            "--bf16": [], "--cache": ["PATH"], "--data-path": ["PATH"], "--load": ["PATH"],
            "--seed": ["7"], "--spec": ["some.module", "layer_spec"],
            "--tensor-model-parallel-size": ["4"],
        },
    }  # fmt: skip
    assert [p.name for p in tmp_path.rglob("*")] == ["run", "pretrain_x.sh"]


def test_a_script_that_starts_nothing_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "tune_x.sh"
    script.write_text("echo torchrun a.py\n")
    with pytest.raises(SystemExit, match="0 commands start a Python file"):
        read_script(script)


def test_the_file_has_a_line_for_every_script(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y.z"]
    (tmp_path / "a").mkdir()
    for name in ("pretrain_b.sh", "pretrain_a.sh", "other.sh"):
        (tmp_path / "a" / name).write_text(SCRIPT)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scripts"]):
        subprocess.run([*git, *words], check=True)
    text = snapshot([(ScriptFolders("x/y", "y", ("a/pretrain_*.sh", "b/*.sh")), tmp_path)])
    (found,) = json.loads(text)
    assert found["repository"] == "x/y" and len(found["commit"]) == 40
    assert list(found["scripts"]) == ["a/pretrain_a.sh", "a/pretrain_b.sh"]
    assert sum(line.startswith('  "a/') for line in text.splitlines()) == 2


def test_of_a_repeated_flag_the_last_counts() -> None:
    assert as_flags(["--a", "1", "2", "--b=3", "--a", "4"]) == {"--a": ["4"], "--b": ["3"]}
