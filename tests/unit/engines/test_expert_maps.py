"""Maps of experts in the layers of a model, and counts of the tokens that its routers send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import forward_context

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.expert_load import ExpertLoad
from mindspeed_rl.engines.vllm.expert_maps import place_experts


class Experts(torch.nn.Module):
    """The part of vLLM's module that knows which experts its rank has."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.register_buffer("_expert_map", torch.tensor([0, 1, -1, -1], dtype=torch.int32))
        own: Any = self._expert_map if shared else self._expert_map.clone()
        self.expert_map_manager = SimpleNamespace(expert_map=own)


def model_of(*shared: bool) -> torch.nn.Module:
    """A model with these layers, of which the first has no experts."""
    model = torch.nn.Module()
    layers = [torch.nn.Linear(2, 2), *(Experts(one) for one in shared)]
    model.add_module("model", torch.nn.Module())
    model.model.add_module("layers", torch.nn.ModuleList(layers))  # type: ignore[union-attr]
    return model


def test_each_layer_gets_its_own_map_in_place() -> None:
    model = model_of(True, False)
    first, second = model.model.layers[1], model.model.layers[2]  # type: ignore[union-attr,index]
    before = first._expert_map.data_ptr()
    place_experts(model, ((1, (3, 0, 2, 1)), (2, (1, 2, 3, 0))), 1, 2)
    assert first._expert_map.tolist() == [-1, 1, 0, -1]
    assert first._expert_map.data_ptr() == before, "kernels and graphs keep the tensor"
    for found in (second._expert_map, second.expert_map_manager.expert_map):
        assert found.tolist() == [1, -1, -1, 0]
    place_experts(model, ((1, (0, 1, 2, 3)),), 0, 2)
    assert first._expert_map.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("moved", [((0, (0, 1, 2, 3)),), ((1, (0, 1, 2, 3, 0, 1)),)])
def test_a_layer_without_such_a_map_is_an_error(moved: Any) -> None:
    with pytest.raises(RuntimeError, match=f"layer {moved[0][0]}"):
        place_experts(model_of(True), moved, 0, 2)


class Router:
    """The hook of vLLM's routers."""

    capture_fn: Any = None

    def set_capture_fn(self, capture_fn: Any) -> None:
        """What is called with the choices of every step."""
        self.capture_fn = capture_fn


def router_model() -> tuple[torch.nn.Module, Router]:
    """A model with a router in layer 1."""
    router, layer, model = Router(), torch.nn.Module(), torch.nn.Module()
    layer.router, layer.layer_id = router, 1  # type: ignore[assignment]
    model.add_module("layer", layer)
    return model, router


LAYOUT: Any = SimpleNamespace(
    engine=EngineLayout(4, 1, 2, expert_parallel=True), spec=SimpleNamespace(num_experts=4)
)


def step_of(monkeypatch: pytest.MonkeyPatch, padding: list[bool], batches: list[int]) -> None:
    """Make this the step that vLLM runs, on the second data-parallel rank of two."""
    ranks = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(batches), local_sizes=None)
    context = SimpleNamespace(dp_metadata=ranks, is_padding=torch.tensor(padding))
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)


def test_tokens_are_counted_by_expert_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the other rank, rows that fill up a batch and dummies are left out."""
    model, router = router_model()
    seen: list[torch.Tensor] = []
    router.set_capture_fn(seen.append)
    load = ExpertLoad(model, (1,), LAYOUT, 3, torch.device("cpu"))
    steps: list[tuple[list[bool], list[int], list[list[int]]]] = [
        ([False, False, True], [1, 3], [[2, 1], [0, 3], [3, 2], [1, 0]]),
        ([False], [2, 1], [[3, 0]]),
        ([True], [2, 1], [[0, 1], [1, 0], [2, 1]]),
    ]
    for padding, batches, chosen in steps:
        step_of(monkeypatch, padding, batches)
        router.capture_fn(torch.tensor(chosen, dtype=torch.int32))
    assert load.take().tolist() == [[2, 0, 1, 3]]
    assert load.take().tolist() == [[0, 0, 0, 0]]
    assert [len(rows) for rows in seen] == [4, 1, 3], "whoever listened before still does"


def test_a_layer_whose_router_is_unknown_is_an_error() -> None:
    model, _ = router_model()
    with pytest.raises(RuntimeError, match="layer 2"):
        ExpertLoad(model, (1, 2), LAYOUT, 3, torch.device("cpu"))
