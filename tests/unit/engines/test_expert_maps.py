"""Maps of experts in the layers of a model, and counts of the tokens that its routers send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_tokens_are_counted_by_expert_until_they_are_taken() -> None:
    model, router = router_model()
    seen: list[torch.Tensor] = []
    router.set_capture_fn(seen.append)
    load = ExpertLoad(model, (1,), 4, torch.device("cpu"))
    for chosen in ([[0, 3], [3, 2]], [[3, 0]]):
        router.capture_fn(torch.tensor(chosen, dtype=torch.int32))
    assert load.take().tolist() == [[2, 0, 1, 3]]
    assert load.take().tolist() == [[0, 0, 0, 0]]
    assert len(seen) == 2, "whoever listened before still does"


def test_a_layer_whose_router_is_unknown_is_an_error() -> None:
    model, _ = router_model()
    with pytest.raises(RuntimeError, match="layer 2"):
        ExpertLoad(model, (1, 2), 4, torch.device("cpu"))
