"""Every recipe: its dry run, the environment of its ranks, its exit code.

Dry runs run in this process; tests/simulated/test_dry_run.py runs some as a user does.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from support.published import PUBLISHED
from support.recipes import RECIPES, SCRIPTS, recipe_flags
from support.tiers import slow_but

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.convert.options import parse_options
from mindspeed_rl.diagnosis.environment import environment_rows
from mindspeed_rl.diagnosis.facts import Facts
from mindspeed_rl.diagnosis.rows import Status
from mindspeed_rl.launch.bootstrap import set_defaults
from mindspeed_rl.launch.job import predict
from mindspeed_rl.planning.dry_run import FITS, dry_run
from mindspeed_rl.planning.phase_limits import phase_limits
from mindspeed_rl.planning.suggestions import plan_of

EXIT_CODE = 7
# A python that tells how it was called; what it is asked about the package it answers.
PYTHON = """#!/usr/bin/env bash
if [[ "$1" == -c ]]; then echo "{package}"; exit 0; fi
env | grep -E '^(HCCL|TASK|CUDA|PYTHONPATH)'
printf '%s\\n' "$@"
exit {code}
"""

# Ranks of every recipe, as it starts without variables.
RANKS = {
    "grpo_deepseek_r1_671b_a3.sh": 256,
    "grpo_qwen3_235b_a22b_a3.sh": 128,
    "dapo_qwen3_235b_a22b_a3.sh": 128,
    "grpo_qwen3_30b_a3b_1node.sh": 8,
    "grpo_qwen2_5_7b_1node.sh": 8,
    "ppo_qwen2_5_32b_a3.sh": 32,
    "grpo_qwen2_5_7b_cuda.sh": 8,
    "grpo_qwen2_5_0_5b_1gpu.sh": 1,
    "distill_qwen2_5_0_5b_1gpu.sh": 1,
    "grpo_qwen2_5_7b_ray.sh": 16,
}
CONVERSIONS = tuple(sorted(p.name for p in SCRIPTS.glob("ckpt_convert_*.sh")))


def test_every_recipe_asks_for_its_devices() -> None:
    found = {
        name: parse(RLRunConfig, recipe_flags(name), "test").config.dry_run.rl_world_size
        for name in RECIPES
    }
    assert found == RANKS
    assert [name for name in CONVERSIONS if "fp8_to_bf16" in name or "hf2mcore" in name]


@pytest.mark.parametrize(
    "recipe",
    slow_but(
        RECIPES, ["grpo_qwen2_5_7b_1node.sh", "ppo_qwen2_5_32b_a3.sh", "grpo_qwen2_5_0_5b_1gpu.sh"]
    ),
)
def test_the_dry_run_fits(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = parse(RLRunConfig, recipe_flags(recipe), "test")
    assert predict(parsed, {}) == FITS
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed and printed.count("weight update, GB") == 1


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["a2", "a3"])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if "_1node" in name])
def test_recipes_of_one_node_fit_both_machines(
    recipe: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse(RLRunConfig, recipe_flags(recipe, ("MACHINE", machine)), "test").config
    assert config.dry_run.rl_world_size == {"a2": 8, "a3": 16}[machine]
    assert dry_run(config, {}) == FITS
    assert f"machine {machine}" in capsys.readouterr().out


def started(recipe: str, folder: Path, *flags: str) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of the launcher in a real start."""
    python = folder / "python"
    python.write_text(PYTHON.format(package=SCRIPTS.parent / "mindspeed_rl", code=EXIT_CODE))
    python.chmod(0o755)
    logs = folder / "logs"
    done = subprocess.run(
        ["bash", str(SCRIPTS / recipe), *flags],
        env={
            "PATH": os.environ["PATH"], "PYTHON": str(python), "LOG_DIR": str(logs),
            "NODE_RANK": "0", "OUTPUT_DIR": str(folder / "out"), "MASTER_ADDR": "10.0.0.1",
        },
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == EXIT_CODE, f"the exit code is lost on the way: {done.stderr}"
    log, deadline = logs / "node0.log", time.monotonic() + 60
    while time.monotonic() < deadline and (
        not log.exists() or log.read_text().count("\n") < done.stdout.count("\n")
    ):
        time.sleep(0.02)
    assert log.read_text() == done.stdout
    lines = done.stdout.splitlines()
    first = lines.index("-m")
    pairs = (line.partition("=") for line in lines[:first])
    return {name: value for name, _, value in pairs}, lines[first:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_start_keeps_its_exit_code_log_and_timeouts(recipe: str, tmp_path: Path) -> None:
    environ, words = started(recipe, tmp_path, "--train-iters", "3")
    if words[1] == "mindspeed_rl.launch.bound_store":
        module = words.index("-m", 1) + 1
        ranks, nodes = "--nproc-per-node", "--nnodes"
        flags = words[module + 1 :]
    else:  # Ray starts the ranks
        module, ranks, nodes = 1, "--ray-ranks-per-node", "--ray-num-nodes"
        flags = words[2:]
    assert words[module] == "mindspeed_rl.train_rl"
    config = parse(RLRunConfig, flags, "test").config
    assert config.train.train_iters == 3, "what the user appends wins"
    started_ranks = int(words[words.index(ranks) + 1]) * int(words[words.index(nodes) + 1])
    assert started_ranks == config.dry_run.rl_world_size
    assert config.launch.orchestrator == ("ray" if module == 1 else "torchrun")
    given_s = config.logging.phase_timeout_s
    assert given_s is None or config.parallel.distributed_timeout_minutes * 60 >= given_s
    npu = config.parallel.platform != "cuda"
    assert npu == ("HCCL_CONNECT_TIMEOUT" in environ)
    if not npu:
        return
    loaded = environ | {"ASCEND_TOOLKIT_HOME": "/cann", "ATB_HOME_PATH": "/atb"}
    if "--master-port" in words:
        loaded["MASTER_PORT"] = words[words.index("--master-port") + 1]
    # Planned from the published config.json: the checkpoint is not there.
    config = parse(RLRunConfig, recipe_flags(recipe), "test").config
    longest_phase_s = phase_limits(config, plan_of(config, started_ranks), "npu").longest
    set_defaults("npu", loaded, longest_phase_s)
    rows = environment_rows(
        Facts(environ=loaded), "npu", longest_phase_s=longest_phase_s, several_nodes=False
    )
    assert not [row for row in rows if row.status is Status.RED]


def test_the_doctor_looks_at_the_layout_of_a_recipe(tmp_path: Path) -> None:
    _, words = started("grpo_qwen2_5_7b_1node.sh", tmp_path, "--doctor", "--rl-world-size", "8")
    module = words.index("-m", 1) + 1
    assert words[module] == "mindspeed_rl.doctor" and "--doctor" not in words
    config = parse(RLRunConfig, words[module + 1 :], "test").config
    assert config.parallel.distributed_timeout_minutes
    assert Path(config.model.hf_checkpoint).samefile(PUBLISHED["qwen2.5-7b"]), "nothing downloaded"


@pytest.mark.parametrize("script", CONVERSIONS)
def test_conversion_scripts_speak_the_tools_language(script: str, tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in ("HF_DIR", "MCORE_DIR", "HF_CFG_DIR")}
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), "--workers", "3"],
        env={"PATH": os.environ["PATH"], "PYTHON": "echo", **places},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tool, *flags = done.stdout.split()
    assert Path(tool) == SCRIPTS.parent / "tools" / "convert_checkpoint.py"
    options = parse_options(flags)
    assert options.work.workers == 3 and options.work.verify


def test_a_machine_that_is_none_is_told() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / "grpo_qwen2_5_7b_1node.sh"), "--rl-dry-run"],
        env={"PATH": os.environ["PATH"], "MACHINE": "a1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == "MACHINE=a1: allowed are a2, a3\n"
