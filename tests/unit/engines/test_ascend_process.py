"""What the product changes of a built vLLM-Ascend engine, and of the process around it."""

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl.engines.vllm_ascend.sampling import report_processed_logprobs
from mindspeed_rl.platforms.npu_changes import ProcessChanges


def test_both_parts_of_the_sampler_report_processed_logprobs() -> None:
    inner = SimpleNamespace(logprobs_mode="raw_logprobs")
    sampler = SimpleNamespace(logprobs_mode="raw_logprobs", topk_topp_sampler=inner)
    report_processed_logprobs(SimpleNamespace(sampler=sampler))
    assert sampler.logprobs_mode == inner.logprobs_mode == "processed_logprobs"
    del inner.logprobs_mode
    with pytest.raises(RuntimeError, match="no logprobs_mode"):
        report_processed_logprobs(SimpleNamespace(sampler=sampler))


def test_replaced_functions_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(torch.cuda, "Event"), (torch.cuda, "mem_get_info"), (torch, "Event"),
              (builtins, "__import__")]  # fmt: skip
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), value in zip(places, before, strict=True):
        monkeypatch.setattr(owner, name, value)  # put back whatever happens
    changes = ProcessChanges()
    for owner, name in places[:-1]:
        setattr(owner, name, object)
    builtins.__import__ = lambda *args, **options: before[-1](*args, **options)
    changes.undo()
    assert [getattr(owner, name) for owner, name in places] == before
