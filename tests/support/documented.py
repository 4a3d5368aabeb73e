"""Commands of a page: bash runs the block, and what it starts of ours runs in this process.

In bash ``python`` and ``torchrun`` note how they were called, and commands of others do nothing.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.architecture import PACKAGE, ROOT
from support.pages import Block

from mindspeed_rl import doctor, train_rl
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.planning.run_plan import plan_rl

# They need the network, root, a cluster or a device, and would change the machine.
OTHERS = ("pip", "git", "docker", "ray", "python3.11")
LAUNCHER = ["-m", "torch.distributed.run"]
OUR_LAUNCHER = ["-m", "mindspeed_rl.launch.bound_store"]
ARRAY = re.compile(r"^(\w+_ARGS)=\((?:[^()]|\([^()]*\))*?\)$", re.M | re.S)
# What "..." stands for, and what the reader's own script brings along: a run that is possible.
GIVEN = """
DISTRIBUTED_ARGS=(--nproc-per-node 8 --nnodes 2)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
)
TRAINING_ARGS=(--bf16 --rl-dry-run-machine a2)
GIVEN=(
    "${MODEL_PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}"
    --hf-checkpoint models/Qwen2.5-7B-Instruct --prompt-data train.jsonl --train-iters 3
    --grpo-prompts-per-step 64 --grpo-group-size 8 --reward-function math
    --rollout-tp 2 --rollout-max-response-length 2048 --rollout-kv-cache-gb 4
)
"""
_RECORDER = """#!/usr/bin/env bash
if [[ "$1" == -c ]]; then echo "{package}"; exit; fi  # which package it would import
printf '%s\\0' "$(( $# + {more} ))" {first} "$@" >> "{record}"
"""


def write_recorders(folder: Path, record: Path) -> None:
    """``python`` and ``torchrun`` that add their arguments to a file."""
    for name, first in (("python", ()), ("torchrun", LAUNCHER)):
        text = _RECORDER.format(
            package=PACKAGE,
            record=record,
            more=len(first),
            first=" ".join(first),
        )
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def as_run(block: Block, folder: Path) -> str:
    """The text of a block with the reader's own things filled in.

    Paths below /models lie in ``folder``, ``...`` are the flags above, and what the page only
    defines, flags, is given to a run.
    """
    text = block.text.replace("/models/", f"{folder}/models/")
    text = re.sub(r" \.\.\.(?=\s)", ' "${GIVEN[@]}"', text)
    if "torchrun" not in text:
        run = r'\g<0>\ntorchrun -m mindspeed_rl.train_rl "${GIVEN[@]}" "${\1[@]}"'
        text = ARRAY.sub(run, text)
    stand_ins = "".join(f"{name}() {{ :; }}\n" for name in OTHERS)
    made_by_installing = '"$1" == */activate || "$1" == */set_env.sh'
    source = f'source() {{ [[ {made_by_installing} ]] || builtin source "$@"; }}\n'
    return f"{GIVEN}{stand_ins}{source}{text}"


def calls_of(block: Block, folder: Path) -> list[list[str]]:
    """Run a block in ``folder``; the arguments of every python that it starts."""
    record, programs = folder / "calls", folder / "bin"
    programs.mkdir()
    write_recorders(programs, record)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", as_run(block, folder)],
        cwd=folder, capture_output=True, text=True, timeout=60,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python"),
            "HUAWEI_INDEX": "https://index.example/simple",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = iter(record.read_text().split("\0")[:-1] if record.exists() else [])
    return [[next(words) for _ in range(int(count))] for count in words]


def execute(words: Sequence[str], patch: pytest.MonkeyPatch) -> int:
    """Do here what a python was to do; its exit code. Runs are predicted instead of started."""
    if list(words[:2]) in (LAUNCHER, OUR_LAUNCHER):
        words = words[words.index("-m", 1) :]
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file() or Path(words[0]).is_file(), words[0]
        patch.setattr(sys, "argv", list(words))
        return _exit_code(lambda: runpy.run_path(words[0], run_name="__main__"))
    module, *argv = words[1:]
    if module == "mindspeed_rl.doctor":
        return doctor.main(argv)
    assert module == "mindspeed_rl.train_rl", f"nothing here can run {module}: add it"
    if not any(word.startswith(("--rl-world-size", "--ray-ranks-per-node")) for word in argv):
        argv += ["--rl-world-size", "16"]
    argv.append("--rl-dry-run")
    return _exit_code(lambda: run_entry(module, RLRunConfig, plan_rl, train_rl.main, argv))


def _exit_code(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as ended:
        assert isinstance(ended.code, int), ended.code
        return ended.code
    return 0
