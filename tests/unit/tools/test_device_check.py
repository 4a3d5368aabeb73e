"""The check of a machine: processes that die, missing packages, arithmetic that is wrong."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device_check import __main__ as check
from device_check import arithmetic, child, plan, ranks, report, runs
from device_check.child import Setting
from device_check.plan import JOBS, SIZES, STAGES, CheckProcess
from device_check.results import Notes, Recorder, Result, StageFailed, StageStatus, read_results

from mindspeed_rl import doctor
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.diagnosis.rows import DoctorRow, green, note, red
from mindspeed_rl.launch.job import predict
from mindspeed_rl.planning.dry_run import FITS
from mindspeed_rl.platforms.cpu import CpuPlatform


def flags(folder: Path, *more: str) -> argparse.Namespace:
    args = check.command_line(["--platform", "cpu", "--output", str(folder), *more])
    args.size = args.size or "tiny"
    return args


def setting(folder: Path, platform: str = "cpu", size: str = "tiny") -> Setting:
    return Setting(platform, SIZES[size], folder, task_steps=2, warm_steps=2)


def test_every_stage_belongs_to_one_process_and_says_what_it_is() -> None:
    assert len(set(STAGES)) == len(STAGES) == 12
    assert set(plan.WHAT) == set(STAGES)


def test_missing_packages_skip_their_stages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "has_module", lambda name: name != "vllm_ascend")
    skipped = [job.name for job in JOBS if plan.missing_modules(job, "npu")]
    assert skipped == ["engine", "steps", "task"]
    assert not [job.name for job in JOBS if plan.missing_modules(job, "cuda")]
    (engine,) = (job for job in JOBS if job.name == "engine")
    args = flags(tmp_path)
    args.platform = "npu"
    results, tail = check.run_job(engine, args, tmp_path)
    assert {r.status for r in results} == {StageStatus.SKIPPED} and not tail
    assert results[0].note == "vllm_ascend not installed (docs/install.md)"


THREE = CheckProcess("three", ("one", "two", "three"))


@pytest.mark.parametrize(
    ("died", "notes"),
    [
        ("the process ended by SIGSEGV", ["", "the process ended by SIGSEGV",
                                          "not reached: the process ended by SIGSEGV"]),
        ("", ["", "its process ended within it", "not reached: its process ended before"]),
    ],
)  # fmt: skip
def test_a_process_that_dies_keeps_what_it_had_found(
    died: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(command: object, log: Path, limit_s: float) -> str:
        recorder = Recorder(tmp_path)
        with recorder.stage("one") as found:
            found.figures["tokens_per_s"] = 1234.5
        recorder.write(Result("two", StageStatus.STARTED))
        log.write_text("first\nlast words\n")
        return died

    monkeypatch.setattr(check, "run_process", dies)
    results, tail = check.run_job(THREE, flags(tmp_path), tmp_path)
    assert [r.status for r in results] == [StageStatus.OK, StageStatus.FAILED, StageStatus.FAILED]
    assert [r.note for r in results] == notes and tail.endswith("last words")
    assert report.shown_figures(results[0]) == "tokens 1234/s"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("pass", ""),
        ("import sys; sys.exit(3)", "the process ended with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the process ended by SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_told(program: str, told: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert check.run_process([sys.executable, "-c", program], log, 60) == told


def test_a_process_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "child"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    told = check.run_process([sys.executable, "-c", program], tmp_path / "log", 3)
    assert told == "not finished after 3 s (--limit-s)"
    child = Path("/proc", file.read_text(), "stat")
    deadline = time.monotonic() + 10
    while child.exists() and " Z " not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or " Z " in child.read_text()


def test_an_error_is_a_result_and_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(ValueError), recorder.stage("one"):
        raise ValueError("\n\nno such kernel\nmore")
    with pytest.raises(StageFailed), recorder.stage("two"):
        raise StageFailed("differs by 3")
    found = read_results(tmp_path)
    assert found["one"].note == "ValueError: no such kernel"
    assert found["two"].note == "differs by 3" and found["two"].status is StageStatus.FAILED


def test_a_report_names_neither_folders_nor_host_nor_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    home = Path.home()
    text = (
        f"{report.ROOT}/tools/x.py: node-17: {home}/secret/model of ada at "
        f"https://me:word@hub/x?token=abc in {tmp_path}/log; Canada"
    )
    assert report.tidy(text, tmp_path) == (
        "<repository>/tools/x.py: <host>: ~/secret/model of <user> at "
        "https://***@hub/x?token=*** in <check>/log; Canada"
    )
    results = [Result("trainer", StageStatus.FAILED, 2.0, {"mfu": 0.4}, f"in {home}/x")]
    facts = report.machine_facts("cpu", {"name": "cpu"})
    files = report.write_report(tmp_path, results, facts, {"trainer": f"{home}/y"})
    for file in files:
        written = file.read_text()
        assert str(home) + "/" not in written and "node-17" not in written
    record = json.loads(files[0].read_text())
    assert record["stages"][0]["figures"] == {"mfu": 0.4}
    assert record["versions"]["torch"] == torch.__version__
    assert "0 of 1 stages ok, 1 failed, 0 skipped" in files[1].read_text()


ARITHMETIC = {
    "checksum": ("mindspeed_rl.proof.checksums.box_checksum", "32-bit integers do not wrap"),
    "attention": ("mindspeed_rl.attention.rows.attend", "padded_sdpa attention, output: differs"),
    "head": ("mindspeed_rl.trainer.logprobs.selected_logprobs", "head, logprob: differs"),
}


@pytest.mark.parametrize("stage", ARITHMETIC)
def test_arithmetic_that_is_wrong_is_found(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device computes is spoiled: one call of two, one element, one log-prob."""
    place, told = ARITHMETIC[stage]
    run = getattr(arithmetic, stage)
    notes = Notes()
    run(setting(tmp_path), CpuPlatform(), notes)
    assert notes.figures
    module, _, name = place.rpartition(".")
    right, calls = getattr(sys.modules[module], name), []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        found = right(*args, **kwargs)
        if stage == "checksum":
            return found + (len(calls) == 2)
        spoiled = torch.zeros_like(found if stage == "attention" else found[0])
        spoiled.view(-1)[5] = 0.01 if stage == "attention" else 1.0
        return found + spoiled if stage == "attention" else (found[0] + spoiled, found[1])

    monkeypatch.setattr(place, wrong)
    with pytest.raises(StageFailed, match=told):
        run(setting(tmp_path), CpuPlatform(), Notes())


@pytest.mark.parametrize("machine", ["gpu24", "h100", "a2", "a3"])
def test_the_work_for_a_device_fits_and_its_flags_are_right(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run of the stages' own flags; planned from a published config of the shape."""
    published = report.ROOT / "pretrain_scripts/models/configs/qwen2.5-0.5b.json"
    monkeypatch.setattr(ranks, "model_of", lambda setting: published)
    platform = "npu" if machine.startswith("a") else "cuda"
    words = ranks.run_flags(setting(tmp_path, platform, "0.5b"))
    words += ["--rl-dry-run", "--rl-world-size", "1", "--rl-dry-run-machine", machine]
    assert predict(parse(RLRunConfig, words, "test"), os.environ) == FITS


@pytest.mark.parametrize(
    ("rows", "code", "told"),
    [
        ([green("packages", "fine"), red("devices", "no GPU", "install one")], None,
         r"^no GPU \(install one\)$"),
        ([green("packages", "fine")], 3, "exit code 3 and no red finding"),
    ],
)  # fmt: skip
def test_a_red_finding_of_the_doctor_fails_its_stage(
    rows: list[DoctorRow], code: int | None, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The file is that of the doctor itself."""

    def entry(words: Sequence[str]) -> int:
        found = doctor._report(rows, words[words.index("--json") + 1])
        return found if code is None else code

    monkeypatch.setattr(runs, "entry", entry)
    with pytest.raises(StageFailed, match=told):
        runs.doctor(setting(tmp_path), Recorder(tmp_path))
    assert read_results(tmp_path)["doctor"].status is StageStatus.FAILED


def test_a_missing_engine_is_a_note_of_the_doctors_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [green("packages", "fine"), note("packages", "vllm is not installed", "pip"),
            note("layout", "no flags")]  # fmt: skip
    monkeypatch.setattr(
        runs, "entry", lambda words: doctor._report(rows, words[words.index("--json") + 1])
    )
    runs.doctor(setting(tmp_path), Recorder(tmp_path))
    found = read_results(tmp_path)["doctor"]
    assert found.status is StageStatus.OK and found.note == "vllm is not installed"
    assert found.figures == {"findings": 3, "red": 0}


def test_why_a_process_could_not_start_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a GPU: what the platform says, at every stage of the process."""

    def no_device(platform: str) -> None:
        raise UsageError("torch 2.11.0 sees no GPU: no driver; install it")

    def in_this_process(command: Sequence[str], log: Path, limit_s: float) -> str:
        monkeypatch.setattr(sys, "argv", command[2:])
        return f"the process ended with exit code {child.main()}"

    monkeypatch.setattr(arithmetic.bootstrap, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(arithmetic.machine, "check_machine", lambda *_: None)
    monkeypatch.setattr("mindspeed_rl.platforms.registry.select_platform", no_device)
    monkeypatch.setattr(check, "run_process", in_this_process)
    (job,) = (job for job in JOBS if job.name == "arithmetic")
    results, _ = check.run_job(job, flags(tmp_path), tmp_path)
    assert [result.stage for result in results] == ["checksum", "attention", "head"]
    for result in results:
        assert result.status is StageStatus.FAILED
        assert result.note == "not reached: torch 2.11.0 sees no GPU: no driver; install it"


def test_a_run_that_ends_tells_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(runs, "entry", lambda words: 2)
    with pytest.raises(StageFailed, match="exit code 2: its log has the reason"):
        runs.require(["mindspeed_rl.train_rl"], log)
    log.write_text("WARNING: x\nmindspeed_rl.train_rl: error: --platform cuda: no GPU\nmore\n")
    with pytest.raises(StageFailed, match="train_rl ended with exit code 2: --platform cuda: no G"):
        runs.require(["mindspeed_rl.train_rl"], log)
    monkeypatch.setattr(runs, "entry", lambda words: 0)
    runs.require(["mindspeed_rl.train_rl"], log)


LEARNED = {"steps": 30.0, "accuracy_before": 0.5, "accuracy_after": 0.5, "worst_mismatch": 5e-4}


@pytest.mark.parametrize(
    ("changes", "half", "told"),
    [
        ({}, False, ""),
        ({"accuracy_after": 0.495}, False, "accuracy fell from 0.500 to 0.495 in 30 steps"),
        ({"accuracy_after": float("nan")}, False, "accuracy fell"),
        ({"accuracy_after": 0.4, "steps": 29.0}, False, ""),
        ({"worst_mismatch": 2e-3, "steps": 2.0}, False, "differ by 0.002 .* up to 0.001 is fine"),
        ({"worst_mismatch": 0.3}, True, ""),
        ({"worst_mismatch": 1.5}, True, "differ by 1.5 .* up to 1 is fine"),
        ({"worst_mismatch": float("nan")}, True, "differ by nan"),
    ],
)
def test_a_task_that_learns_nothing_or_disagrees_fails(
    changes: dict[str, float], half: bool, told: str
) -> None:
    if not told:
        runs.check_task(LEARNED | changes, half=half)
        return
    with pytest.raises(StageFailed, match=told):
        runs.check_task(LEARNED | changes, half=half)


def test_the_limit_of_every_process_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "run_process", lambda *_: "not started here")
    words = ["--platform", "cpu", "--output", str(tmp_path), "--limit-s", "77", "--stages"]
    assert check.main([*words, "checksum", "trainer"]) == 1
    said = capsys.readouterr().out
    for name in ("arithmetic", "trainer"):
        assert f"process {name}, at most 77 s (--limit-s)" in said
