"""Secrets do not reach logs and dumps, and what is none does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.command_line.dispositions import disposition_lines
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.diagnostics import TrackerConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.redaction import is_secret, redacted, redacted_command, redacted_text
from mindspeed_rl.flag_checks.absent_files import absent_files
from mindspeed_rl.flag_checks.single_flags import check_rl_flags
from mindspeed_rl.launch.job import Job
from mindspeed_rl.launch.ray import forwarded
from mindspeed_rl.metrics.trackers import make_trackers
from mindspeed_rl.rewards import RewardRequest
from mindspeed_rl.rewards.builtin.remote import RemoteError, RemoteReward

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@host/score?x=1",
        f"https://{SECRET}@github.com/a/b",
        f"http://host/score?x=1&api_key={SECRET}&y=2",
        f"http://host/?access_token={SECRET}#part",
        f"s3://bucket/o?X-Amz-Signature={SECRET}",
    ],
)
def test_urls_lose_their_secrets_and_nothing_else(text: str) -> None:
    shown = redacted_text(f"cannot reach {text} after 3 attempts")
    assert SECRET not in shown and "***" in shown
    assert shown.startswith("cannot reach ") and shown.endswith(" after 3 attempts")
    assert "host" not in text or "host" in shown


@pytest.mark.parametrize("text", ["a@b.c", "x?key", "--prompt-key answer", "http://host/a?n=1", ""])
def test_other_texts_stay(text: str) -> None:
    assert redacted_text(text) == text


def test_names_of_secrets() -> None:
    for name in ("HF_TOKEN", "wandb_api_key", "AWS_ACCESS_KEY_ID", "DB_PASSWORD", "GH_PAT"):
        assert is_secret(name), name
    for name in ("TOKENIZERS_PARALLELISM", "MONKEY", "PATH", "KEYBOARD", "HF_HOME"):
        assert not is_secret(name), name


def test_a_dump_of_flags_hides_values_by_name_and_form() -> None:
    dump: Any = redacted(
        {
            "engine_options": {"hf_token": SECRET, "max_num_seqs": 4},
            "prompts": {"prompt_key": "question"},
            "rewards": {"urls": (f"http://a:{SECRET}@b",), "weight": 0.5, "none": None},
        }
    )
    assert SECRET not in str(dump)
    assert dump["prompts"] == {"prompt_key": "question"}
    assert dump["rewards"]["urls"] == ("http://***@b",) and dump["rewards"]["weight"] == 0.5


def test_trackers_get_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from pathlib import Path\n"
        "class Run:\n    def log(self, values, step): pass\n    def finish(self): pass\n"
        f"def init(**given):\n    Path({str(tmp_path / 'given')!r}).write_text(repr(given))\n"
        "    return Run()\n"
    )
    argv = ["--reward-function", "remote", "--reward-url", f"http://me:{SECRET}@host/s"]
    config = parse(RLRunConfig, [*argv, "--vllm-hf-token", SECRET], "x").config
    flags = {"rewards": {"url": config.rewards.reward_remote_url}, "o": config.engine_options}
    (tracker,) = make_trackers(TrackerConfig(tracker=(str(file),)), tmp_path / "out", flags)
    tracker.log(1, {"a": 1.0})
    given = (tmp_path / "given").read_text()
    assert "host/s" in given and SECRET not in given


def test_flags_that_mean_nothing_are_listed_without_secrets() -> None:
    parsed: Any = SimpleNamespace(
        without=[], honoured=(), checked_arch=(), compared=(), preset=None
    )
    lines = disposition_lines(parsed, [f"--data-path http://u:{SECRET}@h/x"])
    assert lines and SECRET not in "".join(lines) and "--data-path" in lines[-1]


def test_errors_of_a_server_do_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(
        RLRunConfig,
        ["--reward-url", f"http://me:{SECRET}@127.0.0.1:1/s?token={SECRET}",
         "--reward-url-retries", "0"],
        "x",
    ).config  # fmt: skip
    with pytest.raises(RemoteError) as told:
        RemoteReward(config.rewards)(RewardRequest(1, "", "", "", "stop", 1))
    assert SECRET not in str(told.value) and "127.0.0.1" in str(told.value)


def test_ray_forwards_no_secrets() -> None:
    environ = {"HF_TOKEN": SECRET, "VLLM_API_KEY": SECRET, "HF_HOME": "/x",
               "HF_ENDPOINT": f"http://u:{SECRET}@h"}  # fmt: skip
    found = forwarded(environ)
    assert SECRET not in str(found) and found["HF_HOME"] == "/x"


def test_words_of_a_command_line() -> None:
    words = "--lr 1 --api-key hunter2 x --hf-token=hunter2 --prompt-key key --url http://a:b@c/d"
    shown = "--lr 1 --api-key *** *** --hf-token=*** --prompt-key key --url http://***@c/d"
    assert " ".join(redacted_command(words.split())) == shown


@pytest.mark.parametrize(
    "words",
    [
        f"--hf-token={SECRET}",
        f"--wandb-api-key={SECRET}",
        f"--hf-token {SECRET}",
        f"--reward-url ftp://me:{SECRET}@h/s",
        f"--prompt-data http://me:{SECRET}@h/x --train-iters 1",
        f"--load http://me:{SECRET}@h/x --train-iters nine",
    ],
)
def test_errors_about_flags_show_no_secrets(words: str) -> None:
    """The line, the report to other nodes and the file for torchrun have the text of the error."""
    with pytest.raises(UsageError) as told:
        check_rl_flags(parse(RLRunConfig, words.split(), "x").config, 1, files=True)
    assert SECRET not in str(told.value) + repr(told.value)


def test_lines_of_a_run_show_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = parse(
        RLRunConfig, ["--prompt-data", f"http://me:{SECRET}@h/x", "--train-iters", "1"], "x"
    ).config
    (note,) = absent_files(config)
    job: Any = SimpleNamespace(world=SimpleNamespace(rank=0))
    Job.log_rank0(job, f"prompts: http://me:{SECRET}@h/x has 3 rows")
    shown = note + capsys.readouterr().out
    assert SECRET not in shown and shown.count("http://***@h/x") == 2
