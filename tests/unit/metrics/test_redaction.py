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
from mindspeed_rl.core.redaction import is_secret, redacted, redacted_command, redacted_text
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
    parsed: Any = SimpleNamespace(without=[], honoured=(), checked_arch=(), preset=None)
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
