"""A dry run says which of the files that it names are not there."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig
from mindspeed_rl.flag_checks.absent_files import absent_files


def test_each_file_that_is_absent_is_named_with_its_flag(tmp_path: Path) -> None:
    here, folder, mine = tmp_path / "here.jsonl", tmp_path / "rows", tmp_path / "mine.py"
    for path in (here, mine):
        path.write_text("")
    folder.mkdir()
    flags = [
        *("--prompt-data", "0.5", str(here), "0.5", "my/nope.jsonl"),
        *("--rl-eval-data", f"a={folder}:test", "b=org/name@main:test", "c=gone.parquet"),
        *("--reward-function", "math", f"{mine}:score", "my/gone.py:score=0.5"),
        *("--rl-agent", f"{tmp_path}/agent.py:act"),
    ]
    assert absent_files(parse(RLRunConfig, flags, "test").config) == [
        "note: --prompt-data my/nope.jsonl is not on this machine",
        "note: --rl-eval-data c gone.parquet is not on this machine",
        "note: --reward-function my/gone.py:score is not on this machine",
        f"note: --rl-agent {tmp_path}/agent.py:act is not on this machine",
    ]
    assert absent_files(parse(RLRunConfig, [], "test").config) == []


def test_a_warm_start_names_its_data() -> None:
    config = parse(PretrainRunConfig, ["--sft-data", "gone.jsonl"], "test").config
    assert absent_files(config) == ["note: --sft-data gone.jsonl is not on this machine"]
