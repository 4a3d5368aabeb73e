"""A job that is started again: when, how often, from where, and what is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.rl_run import make_run

from mindspeed_rl.checkpoint.resume import CheckpointRecord, begin, commit
from mindspeed_rl.command_line.arguments import ParsedArguments
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch import attempt
from mindspeed_rl.launch.attempt import (
    End,
    check_peer_folder,
    continued,
    note_end,
    note_step,
    read_end,
)
from mindspeed_rl.launch.recovery_time import FailureTimes, ProcessWatch, recovery_line
from mindspeed_rl.launch.restart import Rules, decide, keeps_copies
from mindspeed_rl.launch.run_lock import LOCK_FILE

RULES = Rules(max_restarts=4, backoff_s=10.0)


def end(step: int | None, kind: str = "error", phase: str = "train") -> End:
    return End(kind, phase, f"{kind} at {step}", step)


def test_pauses_double_while_the_job_gets_no_further() -> None:
    """Ends of different phases are different faults."""
    ends = [end(3), end(7, phase="save"), end(7, phase="log"), end(7, phase="reward"), end(9)]
    pauses = [decide(RULES, ends[: i + 1]).pause_s for i in range(4)]
    assert pauses == [10.0, 10.0, 20.0, 40.0]
    spent = decide(RULES, ends)
    assert "--max-restarts 4" in spent.stop and spent.pause_s == 0.0
    longest = [end(1, phase=str(i)) for i in range(20)]
    assert decide(Rules(50, 10.0), longest).pause_s == 300.0
    assert decide(Rules(50, 10.0, 35.0), longest).pause_s == 335.0, "on another node than the first"


@pytest.mark.parametrize(("kind", "times"), [("error", 2), ("hang", 2), ("lost", 3), ("silent", 3)])
def test_a_fault_that_repeats_at_a_step_ends_the_job(kind: str, times: int) -> None:
    ends = [end(4, kind)]
    while not (decision := decide(RULES, ends)).stop:
        ends.append(end(5, kind) if len(ends) < 2 else ends[-1])
    assert (
        len(ends) == 1 + times and "at step 5" in decision.stop and "phase train" in decision.stop
    )
    before = decide(RULES, [end(None), end(None)])
    assert "before the first step" in before.stop


@pytest.mark.parametrize("kind", ["usage", "stopped"])
def test_what_a_restart_does_not_mend_ends_the_job(kind: str) -> None:
    assert decide(RULES, [end(2, kind)]).stop


def test_the_first_failure_of_a_node_and_its_step_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_end(tmp_path, -9) == End(
        "lost", "unknown", "its launcher ended with exit code -9, and no rank said why", None
    )
    monkeypatch.setenv(attempt.NOTES, str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(attempt, "_current", [None])
    note_step(6)
    assert read_end(tmp_path, 1).step == 6 == attempt.current_step()
    note_end("error", "train", "the cause")
    note_end("lost", "save", "its consequence")
    assert read_end(tmp_path, 1) == End("error", "train", "the cause", 6)


def parsed(tmp_path: Path, flags: str) -> ParsedArguments[RLRunConfig]:
    return ParsedArguments(make_run(tmp_path, flags).config, ())


def checkpoint(save: Path) -> None:
    begin(save, 2, needed_bytes=0)
    commit(save, CheckpointRecord(2, 4, {}, {}, "", False, {}))


def test_a_restarted_job_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Not from the weights that it began with, nor with their flags."""
    save, base = tmp_path / "save", tmp_path / "base"
    base.mkdir()
    typed = parsed(tmp_path, f"--save {save} --load {base} --finetune --no-load-rng")
    again = {attempt.RESTARTS: "1"}
    first, told = continued(typed, {})
    assert first == typed and not told
    without, told = continued(typed, again)
    assert without.config.checkpoint == typed.config.checkpoint and not told
    assert without.config.logging.overwrite_output_dir, "its own results are no reason to refuse"
    checkpoint(save)
    restarted, told = continued(typed, again)
    options = restarted.config.checkpoint
    assert options.load == str(save) and not options.finetune and not options.no_load_rng
    assert "restart 1" in told[0]
    by_torchrun, _ = continued(typed, {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert by_torchrun == restarted


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    """Its results are replaced; those of another run stay."""
    save, output = tmp_path / "save", tmp_path / "out"
    typed = parsed(tmp_path, f"--save {save} --load {save} --output-dir {output}")
    assert not continued(typed, {})[0].config.logging.overwrite_output_dir
    save.mkdir()
    note = '{"host": "a", "pid": 1, "started": "then", "output_dir": "%s"}'
    for other, replaced in ((tmp_path / "other", False), (output, True)):
        (save / LOCK_FILE).write_text(note % other)
        found, told = continued(typed, {})
        assert found.config.logging.overwrite_output_dir is replaced
        assert bool(told) is replaced
    checkpoint(save)
    assert not continued(typed, {})[0].config.logging.overwrite_output_dir


def test_the_parts_of_a_recovery_sum_to_the_whole() -> None:
    failure = FailureTimes(began=100.0, noticed=101.5, gone=104.0)
    times = {"up": 120.0, "engines": 133.25, "loaded": 134.0, "stepped": 140.0}
    line = recovery_line(2, failure, 114.0, times)
    assert "restart 2" in line and "40.0 s after the failure" in line
    parts = [float(part.rpartition(" ")[2]) for part in line.rpartition(": ")[2].split(", ")]
    assert parts == pytest.approx([1.5, 2.5, 10.0, 6.0, 13.2, 0.8, 6.0], abs=0.06)
    assert sum(parts) == pytest.approx(40.0, abs=0.1)


def test_the_end_of_a_rank_is_seen_while_its_launcher_lives(tmp_path: Path) -> None:
    launcher, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        (tmp_path / "process-0").write_text(str(rank.pid))
        watch = ProcessWatch(launcher.pid, tmp_path)
        watch.wait()
        assert watch.first_end is None
        before = time.time()
        rank.kill()
        while watch.first_end is None:
            watch.wait()
        assert before <= watch.first_end <= time.time()
        launcher.kill()
        watch.wait()
        failure = watch.failure(tmp_path / "end.json")
        assert failure.began == watch.first_end and failure.noticed == failure.gone
    finally:
        for process in (launcher, rank):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("command", "keeps"),
    [("--peer-checkpoint-steps 5", True), ("--peer_checkpoint_steps=2", True),
     ("--peer-checkpoint-steps 0", False), ("--save-interval 5", False)],
)  # fmt: skip
def test_the_starter_keeps_copies_for_runs_that_make_them(command: str, keeps: bool) -> None:
    assert keeps_copies(["torchrun", *command.split()]) is keeps


def test_copies_need_a_process_that_outlives_the_ranks(tmp_path: Path) -> None:
    config = parsed(tmp_path, f"--save {tmp_path} --peer-checkpoint-steps 2").config
    with pytest.raises(UsageError, match="--max-restarts"):
        check_peer_folder(config, {})
    check_peer_folder(config, {attempt.PEER_FOLDER: str(tmp_path)})
    check_peer_folder(parsed(tmp_path, "").config, {})


JOB = """
import json, os, sys, time
from pathlib import Path
from mindspeed_rl.launch.attempt import mark, note_end, note_step
attempt = int(os.environ["MINDSPEED_RL_RESTARTS"])
folder = Path(os.environ["MINDSPEED_RL_PEER_FOLDER"])
assert folder.stat().st_mode & 0o777 == 0o700 and folder.parent == Path("/dev/shm")
assert (folder / "kept").exists() == (attempt > 0)
(folder / "kept").touch()
print("attempt", attempt, flush=True)
print("keeps", folder, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
step = {"heals": attempt, "repeats": 5}[sys.argv[1]]
for name in ("up", "engines", "loaded", "stepped"):
    mark(name)
if step == 2:
    time.sleep(0.5)  # the starter looks now and then
    sys.exit(0)
note_step(step)
note_end("error", "train", f"it broke in {step}")
sys.exit(7)
"""


def supervisor(tmp_path: Path, what: str) -> subprocess.Popen[str]:
    (tmp_path / "job.py").write_text(JOB)
    return subprocess.Popen(
        [sys.executable, "-m", "mindspeed_rl.launch.restart", "--max-restarts", "3",
         "--restart-backoff-s", "0.01", "--", sys.executable, str(tmp_path / "job.py"), what,
         "--peer-checkpoint-steps", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip


@pytest.mark.parametrize(("what", "attempts", "code"), [("heals", 3, 0), ("repeats", 2, 7)])
def test_a_command_is_started_again_until_it_ends_well_or_repeats(
    tmp_path: Path, what: str, attempts: int, code: int
) -> None:
    process = supervisor(tmp_path, what)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == code, told
    assert told.count("attempt ") == attempts
    assert "restart 1 of 3 in 0.01 s: the job ended in step" in told
    assert ("no restart: the same fault came 2 times" in told) == (what == "repeats")
    if what == "heals":
        assert "restart 2: the next step was done" in told
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"], "no folder stays"
    kept = {line.split()[1] for line in told.splitlines() if line.startswith("keeps ")}
    assert len(kept) == 1 and not Path(*kept).exists()


def test_a_signal_ends_the_command_and_is_no_failure(tmp_path: Path) -> None:
    process = supervisor(tmp_path, "wait")
    assert process.stdout is not None and process.stdout.readline() == "attempt 0\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    told = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM and "restart" not in told
    assert time.monotonic() - began < 50
