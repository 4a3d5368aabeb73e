"""--log-level: warnings of libraries are silent, but for those who look for them."""

from __future__ import annotations

import pytest
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch import bootstrap, job
from mindspeed_rl.planning.suggestions import plan_of

FLAGS = f"""--hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --prompt-data x.jsonl --train-iters 1
    --platform cpu --rollout-kv-cache-gb 1 --bind-cores none""".split()


@pytest.mark.parametrize(("flags", "silent"), [("", 1), ("--log-level debug", 0)])
def test_libraries_are_silenced_unless_asked(
    flags: str, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced: list[str] = []
    # There is no checkpoint, only its config.json.
    monkeypatch.setattr(job, "check_model_flags", lambda *_, **__: None)
    monkeypatch.setattr(bootstrap, "prepare_environment", lambda *_, **__: [])
    monkeypatch.setattr(job.machine, "check_machine", lambda *_, **__: None)
    monkeypatch.setattr(bootstrap, "quiet_libraries", lambda: silenced.append("libraries"))
    checked = job.plan_run(parse(RLRunConfig, [*FLAGS, *flags.split()], "test"), plan_of, 1)
    job.prepare_rank(checked)
    assert len(silenced) == silent


def test_another_level_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--log-level: .*'info', 'debug'"):
        parse(RLRunConfig, [*FLAGS, "--log-level", "trace"], "test")
