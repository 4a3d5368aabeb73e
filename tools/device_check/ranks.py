"""Starts the product in a process of one rank, with its own checks of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from device_check.child import Setting
from device_check.report import ROOT
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.launch import bootstrap
from mindspeed_rl.launch.job import Job, plan_run, prepare_rank
from mindspeed_rl.planning.run_plan import RLPlan, plan_rl

if TYPE_CHECKING:
    from mindspeed_rl.platforms.base import Platform

PROG = "device_check"


def note_device(folder: Path, platform: Platform) -> None:
    """Write what the driver says of the device, for the report."""
    facts = {"name": platform.device_name}
    if not platform.shares_host_memory:
        memory = platform.memory()
        facts["memory_mib"] = str(memory.total_bytes >> 20)
        facts["taken_mib"] = str(platform.taken_bytes >> 20)
    (folder / "device.json").write_text(json.dumps(facts))


def model_of(setting: Setting) -> Path:
    """Return the folder with config and tokenizer of the model, whose weights are drawn."""
    folder = setting.folder / "model"
    if not folder.exists():
        # In a process of its own: it imports torch, and a rank prepares its environment before.
        command = [sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), "--tied"]
        command += ["--no-weights", "--output", str(folder), *setting.size.model.split()]
        subprocess.run(command, check=True)
    return folder


def run_flags(setting: Setting) -> list[str]:
    """Return the flags of a throughput run of GRPO with the setting's model and work."""
    size, samples = setting.size, setting.size.prompts * setting.size.group
    flags: Sequence[object] = (
        "--platform", setting.platform, "--hf-checkpoint", model_of(setting),
        "--rl-benchmark-lengths", size.prompt, size.response,
        "--max-prompt-length", size.prompt, "--rollout-max-response-length", size.response,
        "--train-iters", 3, "--grpo-prompts-per-step", size.prompts,
        "--grpo-group-size", size.group, "--micro-batch-size", min(8, samples),
        "--lr", "1e-5", "--use-distributed-optimizer", "--rl-offload", "all",
        "--reshard-verify-interval", 0, "--rollout-kv-cache-gb", size.cache_gb,
        "--vllm-max-num-seqs", samples,
    )  # fmt: skip
    return [*map(str, flags), *(["--bf16"] if setting.half else [])]


def start(setting: Setting) -> Job[RLRunConfig, RLPlan]:
    """Check the machine, start platform and process group, and plan the run."""
    bootstrap.join_launcher(PROG, os.environ)
    world = bootstrap.World.from_environment()
    argv = [*run_flags(setting), "--output-dir", str(setting.folder / "run")]
    checked = plan_run(parse(RLRunConfig, argv, PROG), plan_rl, world.size)
    prepare_rank(checked)
    config = checked.parsed.config
    platform = bootstrap.start(setting.platform, 5, world, checked.setup)
    note_device(setting.folder, platform)
    bootstrap.seed_everything(config.train.seed)
    watchdog = SimpleNamespace(phase=lambda *_: nullcontext())
    return Job(config, checked.plan, world, platform, cast(Any, watchdog), (), 5)
