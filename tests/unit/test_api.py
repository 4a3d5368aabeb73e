"""The Python interface, as far as it goes without a run: its command line and its refusals."""

import functools
import json
import sys
from pathlib import Path

import pytest

from mindspeed_rl import api
from mindspeed_rl.api import RLTrainer, RunResult, as_arguments
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.rewards import RewardRequest


def same_text(request: RewardRequest) -> float:
    """A reward."""
    return float(request.response == request.answer)


def test_flags_become_words() -> None:
    flags = {
        "train_iters": 20, "lr": 1e-6, "bf16": True, "sequence_parallel": False, "save": None,
        "rl_eval_data": ["a=x.jsonl", "b=y.jsonl"], "vllm_compilation_config": {"level": 0},
        "export_hf": Path("out/hf"),
    }  # fmt: skip
    assert as_arguments(flags) == [
        *("--train-iters", "20", "--lr", "1e-06", "--bf16"),
        *("--rl-eval-data", "a=x.jsonl", "b=y.jsonl"),
        *("--vllm-compilation-config", '{"level": 0}', "--export-hf", "out/hf"),
    ]


def test_under_torchrun_a_process_starts_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    command = RLTrainer("m", "x.jsonl", "math", output_dir=tmp_path / "out", num_ranks=8).command
    assert command[1:3] == ["-m", "mindspeed_rl.train_rl"]


def test_rows_are_written_beside_the_results(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "ü", "answer": "3", "level": 4}]
    trainer = RLTrainer(
        "models/x",
        iter(rows),
        [same_text, "format=0.1"],
        eval_data=rows[:1],
        output_dir=tmp_path / "out",
        num_ranks=2,
        flags={"train_iters": 3, "rl_preset": "dapo"},
    )
    for name, count in (("prompts", 2), ("heldout", 1)):
        lines = (tmp_path / f"out.{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows[:count]
    command = " ".join(trainer.command)
    assert command.startswith(f"{sys.executable} -m torch.distributed.run --standalone --nproc")
    assert f"--reward-function {__file__}:same_text format=0.1 --output-dir" in command
    assert command.endswith("--train-iters 3 --rl-preset dapo")
    alone = RLTrainer("m", "x.jsonl", "math", output_dir=tmp_path / "one").command
    assert alone[1:3] == ["-m", "mindspeed_rl.train_rl"]


@pytest.mark.parametrize(
    "reward", [lambda r: 0.0, functools.partial(same_text), len, str.upper, 3.0]
)
def test_a_reward_that_no_other_process_can_import_is_refused(reward: object) -> None:
    with pytest.raises(ValueError, match="%%writefile"):
        RLTrainer("m", "x.jsonl", [reward])  # type: ignore[list-item]


def test_wrong_flags_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"--learning-rate of other stacks; it is --lr here"):
        RLTrainer("m", "x.jsonl", "math", flags={"learning_rate": 1e-6})
    with pytest.raises(UsageError, match="--grpo-group-size"):
        RLTrainer("m", "x.jsonl", "math", flags={"grpo_group_size": "many"})


def test_results_are_read_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2}\n')
    (tmp_path / "rollouts.jsonl").write_text('{"response": "7"}\n')
    result = RunResult(tmp_path, {"hf_checkpoint": str(tmp_path / "hf")})
    assert result.metrics() == [{"step": 1, "reward/mean": 0.5}, {"step": 2}]
    assert result.rollouts() == [{"response": "7"}]
    assert result.model == tmp_path / "hf"
    assert RunResult(tmp_path, {"hf_checkpoint": ""}).model is None


def test_a_run_that_fails_says_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = RLTrainer("m", "x.jsonl", "math", output_dir=tmp_path / "out")
    program = "print('one'); import sys; print('the cause', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(RLTrainer, "command", [sys.executable, "-uc", program])
    with pytest.raises(RuntimeError, match=r"exit code 3:\none\nthe cause"):
        trainer.train()
    assert capsys.readouterr().out == "one\nthe cause\n"


def test_an_interrupt_ends_all_processes_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ignores it is killed, and so is its child."""
    note = tmp_path / "child"
    program = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); child = os.fork()\n"
        f"if child: open({str(note)!r}, 'w').write(str(child)); print('started', flush=True)\n"
        "time.sleep(60)"
    )
    trainer = RLTrainer("m", "x.jsonl", "math", output_dir=tmp_path / "out")
    monkeypatch.setattr(RLTrainer, "command", [sys.executable, "-uc", program])
    monkeypatch.setattr(api, "_STOP_S", 0.3)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    status = Path(f"/proc/{int(note.read_text())}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
