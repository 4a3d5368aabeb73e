"""``--rl-selftest loss``: the flag reaches the check; a finding that fails ends the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rl import train_rl
from mindspeed_rl.rl import build
from mindspeed_rl.selftest import loss as selftest
from mindspeed_rl.selftest.loss import Finding

WITHIN, BEYOND = (0.5, "loss/policy"), (1.5, "decoder.weight")


def job_of(said: list[str], flag: str = "loss") -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(rl=SimpleNamespace(rl_selftest=flag)),
        world=SimpleNamespace(size=2),
        platform=SimpleNamespace(device=torch.device("cpu")),
        log_rank0=lambda *lines: said.extend(lines),
    )


def check_with(found: list[Finding], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(selftest, "run", lambda job, trials: found)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)
    try:
        selftest.check(job_of(said))
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_what_fails_is_named_and_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Finding("dp 2", "2 samples", WITHIN, WITHIN)
    bad = Finding("tp 2", "8 samples", WITHIN, BEYOND)
    assert check_with([good], monkeypatch)[-1] == "self-test of the loss: passed"
    said = check_with([good, bad], monkeypatch)
    assert said[1].startswith("ok   dp 2") and said[2].startswith("FAIL tp 2, 8 samples")
    assert "1.5 (decoder.weight)" in said[2]
    assert "1 layouts or cuts give other results than one rank" in said[-1]


def test_the_flag_runs_the_check_instead_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(selftest, "check", checked.append)
    job = job_of([])
    monkeypatch.setattr(build, "build_components", lambda job: pytest.fail("it trains"))
    train_rl.main(job)
    assert checked == [job]
