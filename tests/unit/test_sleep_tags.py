"""An engine with a sleep mode of its own gives its memory away through it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.layout_cases import GQA, spec_of

from mindspeed_rl.config.engine_tuning import EngineTuningConfig
from mindspeed_rl.parallel.layout import EngineLayout
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.resharding.layouts.vllm import VllmLayout
from mindspeed_rl.rollout import host_backend
from mindspeed_rl.rollout.host_backend import HostBackend, parts_by_tag
from mindspeed_rl.rollout.vllm_versions import engine_capabilities, installed_version


class Model(torch.nn.Module):
    """A parameter, a buffer, and a tensor that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.register_buffer("rotary", torch.arange(4.0), persistent=False)
        self.__dict__["expert_map"] = torch.tensor([3, 1])


class Executor:
    """vLLM's executor: memory that left holds noise when it is back. Calls are noted."""

    def __init__(self) -> None:
        model, cache = Model(), torch.full((16,), 5.0)
        runner = SimpleNamespace(
            model=model,
            kv_caches=[cache],
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        self.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.pool = {
            "weights": [model.weight.data, model.rotary, model.__dict__["expert_map"]],
            "kv_cache": [cache],
        }
        self.sleeping_tags: set[str] = set()
        self.calls: list[tuple[str, str]] = []

    def discard(self, tags: tuple[str, ...]) -> None:
        (tag,) = tags
        self.calls.append(("discard", tag))
        self.sleeping_tags.add(tag)
        for tensor in self.pool[tag]:
            tensor.fill_(-77)

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        self.calls.append(("wake", tag))
        self.sleeping_tags.remove(tag)


def test_tags_leave_one_by_one_and_what_no_update_writes_comes_back() -> None:
    executor = Executor()
    engine = SimpleNamespace(
        model_executor=executor, model_config=SimpleNamespace(dtype=torch.float32)
    )
    parts = parts_by_tag(SimpleNamespace(llm_engine=engine))
    assert (parts.weights.num_bytes, parts.cache.num_bytes) == (32, 64)
    assert parts.stable_addresses, "captured graphs stay valid"
    for _ in range(2):
        for memory in (parts.cache, parts.weights):
            memory.free()
            memory.free()
        for memory in (parts.weights, parts.cache):
            memory.bring_back()
            memory.bring_back()
    once = [("discard", "kv_cache"), ("discard", "weights")]
    assert executor.calls == 2 * [*once, ("wake", "weights"), ("wake", "kv_cache")]
    weight, rotary, experts = executor.pool["weights"]
    assert torch.equal(rotary, torch.arange(4.0)) and experts.tolist() == [3, 1]
    assert bool((weight == -77).all()), "the next update writes it"
    assert not executor.pool["kv_cache"][0].any()


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_capability_of_the_version_decides(
    sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(engine_capabilities(installed_version(), "cpu"), sleep_tags=sleeps)
    monkeypatch.setattr(host_backend, "engine_capabilities", lambda *about: row)
    monkeypatch.setattr(host_backend, "parts_by_tag", lambda llm: "tags")
    monkeypatch.setattr(host_backend, "parts_by_storage", lambda llm: "storages")
    platform = cast(Any, SimpleNamespace(name="cuda"))
    layout = VllmLayout(spec_of(GQA), EngineLayout(1, 1))
    backend = HostBackend(platform, layout, EngineTuningConfig())
    assert cast(Any, backend.parts(None)) == ("tags" if sleeps else "storages")
    if sleeps:
        options = backend.settings({"enforce_eager": False})
        assert options["enable_sleep_mode"] is True and options["enforce_eager"] is False
    else:
        assert "enable_sleep_mode" not in backend.settings({})
        with pytest.raises(ValueError, match="captured graphs keep addresses"):
            backend.settings({"enforce_eager": False})


def test_no_proven_version_on_a_host_has_tags() -> None:
    """vLLM's pool is a device's; on a CPU pages are given back instead."""
    assert not engine_capabilities(installed_version(), CpuPlatform().name).sleep_tags
