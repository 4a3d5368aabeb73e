"""vLLM-Ascend's weights and memory through the product's engine, on fakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_ascend import GARBAGE, AscendDouble
from support.layout_cases import GQA, LATENT, MOE, Case, spec_of

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.platforms.allocator_settings import WANTED
from mindspeed_rl.rollout.engine import EngineState
from mindspeed_rl.rollout.vllm.layout import VllmLayout

# Equal sizes, so that no shape tells one layout of the experts from the other.
SQUARE = replace(MOE, hidden=16, expert_ffn=16)
CASES = {
    "dense": GQA,
    "experts": MOE,
    "square w2": SQUARE,
    "square w13": replace(MOE, hidden=16, expert_ffn=8),
    "latent": LATENT,
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AscendDouble]:
    """A model, and further settings -> its engine."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")

    def build(case: Case, kind: type[AscendDouble] = AscendDouble, **more: Any) -> AscendDouble:
        layout = VllmLayout(
            spec_of(case), EngineLayout(1, 1), transposed_experts=True, expert_module="mlp.experts"
        )
        return kind(layout, str(tmp_path), **more)

    return build


def new_weights(engine: AscendDouble, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(view.shape, generator=generator)
        for name, view in engine.weight_views().items()
    }


def synced(engine: AscendDouble, seed: int, by_loader: bool = False) -> dict[str, torch.Tensor]:
    """New weights, all written, in an update that has begun."""
    weights = new_weights(engine, seed)
    if by_loader:
        for key, value in weights.items():
            engine.load_tensor(key, value)
        return weights
    for key, view in engine.weight_views().items():
        assert view.is_contiguous(), "a reshard writes rectangles of it"
        view.copy_(weights[key])
    return weights


def check(engine: AscendDouble, expected: Mapping[str, torch.Tensor]) -> None:
    """What kernels read, not what our views say."""
    model = engine.worker.model
    for name, param in model.named_parameters():
        assert torch.equal(param.data, expected[name]), name
        assert param.is_contiguous(), f"{name}: kernels read it in order"
    for latent in model.latent:
        assert torch.equal(latent.W_UV, latent.products()[0])
        assert torch.equal(latent.W_UK_T, latent.products()[1])
    assert torch.equal(model.stray[0], torch.arange(5.0)), "a plain tensor of the pool"


def sleep(engine: AscendDouble) -> None:
    engine.free_cache()
    engine.free_weights()
    weights = [d.keeps for d in engine.pool.pointer_to_data.values()]
    assert all(int(t.view(torch.uint8).flatten()[0]) == GARBAGE for t in weights)


@pytest.mark.parametrize("by_loader", [False, True], ids=["direct", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_three_cycles_of_sleep_wake_and_sync(
    name: str, by_loader: bool, make: Callable[..., AscendDouble]
) -> None:
    """Weights are equal after each, every expert is turned once per update, nothing moves."""
    engine = make(CASES[name])
    addresses = {n: p.data_ptr() for n, p in engine.worker.model.named_parameters()}
    for update in (1, 2, 3):
        sleep(engine)
        engine.wake(["weights"])
        engine.begin_update()
        turns = [method.turns for method in engine.worker.model.methods]
        weights = synced(engine, update, by_loader)
        engine.finish_update(update)
        engine.wake(["kv_cache"])
        assert engine.state is EngineState.AWAKE and engine.weights_version == update
        assert torch.count_nonzero(engine.worker.cache) == 0
        check(engine, weights)
        assert [m.turns for m in engine.worker.model.methods] == [t + 1 for t in turns]
        assert {p.conversions for p in engine._derived.experts.params} <= {1}
        now = {n: p.data_ptr() for n, p in engine.worker.model.named_parameters()}
        assert now == addresses


def test_updates_without_sleep(make: Callable[..., AscendDouble]) -> None:
    """The engine keeps its memory; and one update is given up half-way by a sleep."""
    engine = make(SQUARE)
    for update in (1, 2):
        engine.begin_update()
        weights = synced(engine, update, by_loader=True)
        engine.finish_update(update)
        check(engine, weights)
    engine.begin_update()
    sleep(engine)
    engine.wake(["weights"])
    engine.begin_update()
    weights = synced(engine, 3)
    engine.finish_update(3)
    check(engine, weights)


def test_only_the_cache_sleeps(make: Callable[..., AscendDouble]) -> None:
    engine = make(MOE)
    engine.begin_update()
    weights = synced(engine, 1)
    engine.finish_update(1)
    engine.free_cache()
    check(engine, weights)
    engine.wake(["kv_cache"])
    assert torch.count_nonzero(engine.worker.cache) == 0
    check(engine, weights)
    assert engine.weights_version == 1


def test_segments_expand_while_the_weights_are_away(
    make: Callable[..., AscendDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off while the pool is filled and mapped, on in between, where the user asked."""
    engines: list[AscendDouble] = []
    told: list[tuple[str, set[bool]]] = []

    def switch(setting: str) -> None:
        pools = [data for e in engines for data in e.pool.pointer_to_data.values()]
        told.append((setting, {data.mapped for data in pools if "weights" in data.tag}))

    memory = SimpleNamespace(_set_allocator_settings=switch)
    monkeypatch.setitem(sys.modules, "torch_npu.npu.memory", memory)
    for wanted in ("0", "1"):
        monkeypatch.setenv(WANTED, wanted)
        engines[:] = [make(MOE)]
        sleep(engines[0])
        engines[0].wake(["weights"])
        engines[0].wake(["kv_cache"])
    off, on = "expandable_segments:False", "expandable_segments:True"
    assert told == [(off, {True}), (on, {False}), (off, {False})]
    del memory._set_allocator_settings
    with pytest.raises(RuntimeError, match="_set_allocator_settings is gone; written for"):
        make(MOE)


def test_a_version_that_turns_behind_our_back_is_caught(make: Callable[..., AscendDouble]) -> None:
    """Processing that leaves experts as loaded, and one that moves them."""
    engine = make(MOE)
    for method in engine.worker.model.methods:
        method.process_weights_after_loading = lambda layer: None
    engine.begin_update()
    with pytest.raises(RuntimeError, match="processing left it in loader layout"):
        engine.finish_update(1)

    def moves(layer: torch.nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            turned = getattr(layer, name).data.transpose(1, 2).clone()
            layer.register_parameter(name, torch.nn.Parameter(turned))

    for method in engine.worker.model.methods:
        method.process_weights_after_loading = moves
    engine.begin_update()
    with pytest.raises(RuntimeError, match=r"is neither the kernel layout .* nor its transpose"):
        engine.finish_update(1)


def test_the_engine_is_built_for_updates(make: Callable[..., AscendDouble]) -> None:
    """Arguments that training needs."""
    new = make(MOE).settings
    assert new["additional_config"] == {
        "weight_nz_mode": 0,
        "enable_cpu_binding": False,
        "refresh": True,
        "dp_allreduce_on_npu": True,
    }
    assert new["enable_sleep_mode"] and new["kv_cache_memory_bytes"] == 1 << 20
    assert new["enforce_eager"] and new["load_format"] == "dummy"
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0", "the other place that is asked"


def test_an_engine_with_nz_weights_is_refused(make: Callable[..., AscendDouble]) -> None:
    class WithNz(AscendDouble):
        def _backend(self, *about: Any) -> Any:
            self.configuration.weight_nz_mode = 1
            return super()._backend(*about)

    class WithNzWeight(AscendDouble):
        def _backend(self, *about: Any) -> Any:
            self.formats[1] = 29
            return super()._backend(*about)

    with pytest.raises(RuntimeError, match=r"NZ format \(weight_nz_mode = 1\)"):
        make(GQA, WithNz)
    with pytest.raises(RuntimeError, match=r"NZ format \(model\..* has format 29\)"):
        make(GQA, WithNzWeight)
    told = make(GQA).weight_format
    assert told.startswith("engine weights: not in NZ; formats of the ")
    assert ": 2; weight_nz_" in told


def test_graphs_are_captured_where_they_are_asked_for(make: Callable[..., AscendDouble]) -> None:
    tuning = EngineTuningConfig(rollout_graph_mode="full-decode")
    settings = make(LATENT, tuning=tuning).settings
    assert settings["compilation_config"] == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert settings["enforce_eager"] is False
