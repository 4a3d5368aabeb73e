"""``config.json``: with what a run was started."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_rl.command_line.arguments import ParsedArguments, own_flags, parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.metrics.loggers import TensorBoardBackend
from mindspeed_rl.metrics.run_record import (
    as_markdown,
    flag_values,
    installed_versions,
    source_commit,
    write_run_record,
)

TYPED = (
    "--hf-checkpoint m --prompt-data p.jsonl --lr 3e-6 --reward-function math=0.9 format=0.1 "
    "--bf16 --vllm-max-num-seqs 7 --vllm-swap-space 4"
)


def parsed(extra: str = "") -> ParsedArguments[RLRunConfig]:
    words = f"{TYPED} {extra}".split()
    return parse(RLRunConfig, words, "mindspeed_rl.train_rl", keep_refused=True)


def job(arguments: ParsedArguments[RLRunConfig]) -> Any:
    return SimpleNamespace(
        config=arguments.config, command_line=arguments.typed,
        platform=SimpleNamespace(name="cpu"), world=SimpleNamespace(size=6, local_size=3),
    )  # fmt: skip


def test_values_are_those_in_effect_by_flag() -> None:
    values = flag_values(parsed().config)
    assert values["--lr"] == 3e-6
    assert values["--bf16"] is True
    assert values["--reward-function"] == ("math=0.9", "format=0.1")
    assert values["--vllm-max-num-seqs"] == 7
    assert values["--vllm-swap-space"] == 4
    assert values["--clip-grad"] == parsed().config.train.clip_grad == 1.0, "a default"
    names = {flag.spellings[0] for _, flags in own_flags(RLRunConfig) for flag in flags}
    assert names <= set(values)


def test_a_switch_that_is_on_is_named_by_the_flag_that_turns_it_off() -> None:
    off = [
        flag.spellings[0]
        for _, flags in own_flags(RLRunConfig)
        for flag in flags
        if flag.default is True
    ]
    assert off
    assert not any(flag_values(parsed().config)[name] for name in off)
    assert flag_values(parsed(off[0]).config)[off[0]] is True


def test_the_record_says_what_ran_and_where(tmp_path: Path) -> None:
    arguments = parsed(f"--output-dir {tmp_path}")
    write_run_record(job(arguments), 0)
    record = json.loads((tmp_path / "config.json").read_text())
    assert " ".join(record["command_line"]) == f"{TYPED} --output-dir {tmp_path}"
    assert record["after_step"] == 0
    assert (record["machine"]["ranks"], record["machine"]["ranks_per_node"]) == (6, 3)
    assert record["versions"]["torch"] == metadata.version("torch")
    assert record["flags"]["--output-dir"] == str(tmp_path)


def test_secrets_of_the_command_line_are_hidden(tmp_path: Path) -> None:
    url = "https://me:hunter2@judge.example/score"
    words = f"--output-dir {tmp_path} --reward-url {url} --vllm-api-key=hunter2"
    write_run_record(job(parsed(words)), 0)
    text = (tmp_path / "config.json").read_text()
    assert "hunter2" not in text
    assert "https://***@judge.example/score" in text and "--vllm-api-key=***" in text


def test_a_resume_keeps_the_record_of_the_start_before(tmp_path: Path) -> None:
    for lr, start in (("1e-6", 0), ("2e-6", 40)):
        write_run_record(job(parsed(f"--output-dir {tmp_path} --lr {lr}")), start)
    now, before = (
        json.loads((tmp_path / name).read_text())
        for name in ("config.json", "config-until-step-40.json")
    )
    assert (now["flags"]["--lr"], now["after_step"]) == (2e-6, 40)
    assert (before["flags"]["--lr"], before["after_step"]) == (1e-6, 0)


def test_the_commit_says_whether_files_differ(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode().strip()

    assert source_commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-qm", "a")
    commit = git("rev-parse", "HEAD")
    assert source_commit(tmp_path) == commit
    (tmp_path / "a.py").write_text("a = 2\n")
    assert source_commit(tmp_path) == f"{commit}-dirty"


def test_packages_that_are_not_installed_are_left_out() -> None:
    versions = installed_versions()
    assert "transformers" in versions and "torch_npu" not in versions and "minimum" not in versions


def test_tensorboard_shows_the_values(tmp_path: Path) -> None:
    text = as_markdown({"--lr": 3e-6})
    with closing(TensorBoardBackend(tmp_path, text)) as board:
        board.log(1, {"reward/mean": 1.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("config/text_summary")
    assert event.tensor_proto.string_val[0].decode() == text
    assert "| `--lr` | `3e-06` |" in text
