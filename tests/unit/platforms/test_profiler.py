"""Profiler windows: which steps and ranks, and a trace that opens."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import ProfilerConfig, RLRunConfig
from mindspeed_rl.config.diagnostics import check_profiler
from mindspeed_rl.metrics.profiler import StepProfiler
from mindspeed_rl.metrics.timers import PhaseTimer
from mindspeed_rl.platforms.cpu import CpuPlatform

WINDOW = ProfilerConfig(profile=True, profile_step_start=2, profile_step_end=4)


def steps_in_trace(profiler: StepProfiler, folder: Path, steps: range) -> dict[str, set[int]]:
    """Runs steps that multiply matrices of their own size; trace -> the steps it shows."""
    for step in steps:
        profiler.begin_step(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(step, step) @ torch.ones(step, step)
    profiler.close()
    found = {}
    for file in sorted(folder.glob("*.json")):
        events = json.loads(file.read_text())["traceEvents"]
        assert any(event.get("name") == "aten::mm" for event in events)
        names = {event["name"] for event in events if str(event.get("name")).startswith("step ")}
        found[file.name] = {int(name.split()[1]) for name in names}
    return found


def test_a_window_is_one_trace_that_opens(tmp_path: Path) -> None:
    profiler = StepProfiler(WINDOW, CpuPlatform(), 0, tmp_path)
    found = steps_in_trace(profiler, tmp_path / "profile", range(1, 6))
    assert found == {"rank0_steps2-3.pt.trace.json": {2, 3}}


def test_a_run_that_ends_inside_the_window_writes_its_trace(tmp_path: Path) -> None:
    """And one that resumes inside it profiles the rest."""
    config = replace(WINDOW, profile_step_end=9, profile_save_path=str(tmp_path / "mine"))
    profiler = StepProfiler(config, CpuPlatform(), 0, tmp_path)
    found = steps_in_trace(profiler, tmp_path / "mine", range(3, 5))
    assert found == {"rank0_steps3-4.pt.trace.json": {3, 4}}


def phases_in(file: Path) -> set[str]:
    """Of our own, in a trace."""
    events = json.loads(file.read_text())["traceEvents"]
    names = (str(event.get("name")) for event in events)
    return {name.removeprefix("phase ") for name in names if name.startswith("phase ")}


def test_phases_are_ranges_of_the_trace_and_of_no_step_outside(tmp_path: Path) -> None:
    profiler = StepProfiler(WINDOW, CpuPlatform(), 0, tmp_path)
    timer = PhaseTimer(CpuPlatform(), mark=profiler.phase)
    for step in range(1, 6):
        profiler.begin_step(step)
        with timer("train"), timer(f"part {step}"):
            torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.close()
    (file,) = (tmp_path / "profile").iterdir()
    assert phases_in(file) == {"train", "part 2", "part 3"}


@pytest.mark.parametrize(
    ("ranks", "rank", "asked"),
    [(("0",), 0, True), (("0",), 1, False), (("0", "8"), 8, True), (("-1",), 5, True),
     (("all",), 5, True)],
)  # fmt: skip
def test_only_the_ranks_that_were_asked_for(
    ranks: tuple[str, ...], rank: int, asked: bool, tmp_path: Path
) -> None:
    config = replace(WINDOW, profile_ranks=ranks)
    assert config.asks_for(rank) is asked
    if not asked:
        profiler = StepProfiler(config, CpuPlatform(), rank, tmp_path)
        assert steps_in_trace(profiler, tmp_path / "profile", range(1, 6)) == {}
    assert not replace(config, profile=False).asks_for(rank)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--profile --profile-step-start 5 --profile-step-end 5", "must be above"),
        ("--profile --profile-ranks 0 4", "--profile-ranks 4: allowed are 0 to 3"),
        ("--profile --profile-ranks x", "--profile-ranks x"),
    ],
)
def test_windows_that_record_nothing_are_refused(flags: str, words: str) -> None:
    config = parse(RLRunConfig, flags.split(), "test").config.profiler
    with pytest.raises(ValueError, match=words):
        check_profiler(config, 4)


def test_flags_of_megatron_and_mindspeed_are_taken() -> None:
    flags = "--profile --profile-step-start 3 --profile-step-end 5 --profile-ranks -1"
    flags += " --profile-level level1 --profile-with-stack --profile-with-memory"
    flags += " --profile-record-shapes --profile-save-path traces --use-pytorch-profiler"
    parsed = parse(RLRunConfig, flags.split(), "test")
    check_profiler(parsed.config.profiler, 4)
    assert parsed.config.profiler == ProfilerConfig(
        True, 3, 5, ("-1",), "traces", "level1", True, True, True
    )
    assert parsed.ignored == ("--use-pytorch-profiler",)


def npu_profiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ours around a torch_npu that analyses in forks and fails without an exception.

    With the real one: ``tests/ascend/test_profiler.py``.
    """

    class Profile:
        def __init__(self, **options: Any) -> None: ...

        def stop(self) -> None:
            multiprocessing.set_start_method("fork", force=True)

    package, module = ModuleType("torch_npu"), ModuleType("torch_npu.profiler")
    package.profiler = module  # type: ignore[attr-defined]
    module.__dict__.update(
        profile=Profile,
        tensorboard_trace_handler=lambda folder, worker_name: (folder, worker_name),
        _ExperimentalConfig=lambda profiler_level: profiler_level,
        ProfilerLevel=SimpleNamespace(Level0=0, Level1=1, Level2=2),
        ProfilerActivity=SimpleNamespace(CPU="cpu", NPU="npu"),
    )
    ours = "mindspeed_rl.platforms.npu_profiler"
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setitem(sys.modules, "torch_npu.profiler", module)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    from mindspeed_rl.platforms.npu_profiler import NpuProfiler

    monkeypatch.delitem(sys.modules, ours)
    return NpuProfiler(ProfilerConfig(profile_level="level2"), folder, "rank3")


def test_a_window_of_which_torch_npu_left_no_trace_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank3_1_20261121_ascend_pt" / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True)
    profiler = npu_profiler(tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match="--profile"):
        profiler.stop("steps2-3")
