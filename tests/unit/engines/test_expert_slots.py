"""Tables of slots in the layers of vLLM-Ascend, and counts of the tokens that it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.layout_cases import MOE, spec_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.engines.vllm_ascend.expert_slots import (
    ComputedExperts,
    place_experts,
    with_table,
)

SPEC = spec_of(MOE)
LAYOUT = VllmLayout(SPEC, EngineLayout(4, 1, 2, expert_parallel=True))
LAYERS = SPEC.expert_layers[:2]
FIRST, SECOND = LAYERS


class Method:
    """What computes the experts of a layer; it is asked with the tokens of each expert."""

    def apply(self, tokens: list[int], group_list_type: int) -> Any:
        return SimpleNamespace(expert_tokens=torch.tensor(tokens), group_list_type=group_list_type)


class Experts(torch.nn.Module):
    """The part of vLLM-Ascend's module that has the table."""

    def __init__(self, table: torch.Tensor | None) -> None:
        super().__init__()
        self.log2phy, self.quant_method = table, Method()


def table() -> torch.Tensor:
    return torch.arange(4, dtype=torch.int32)


def model_of(*tables: torch.Tensor | None) -> Any:
    """A model whose layers with experts have these tables."""
    model: Any = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleDict()
    for layer, one in zip(LAYERS, tables, strict=True):
        mlp: Any = torch.nn.Module()
        mlp.experts = Experts(one)
        model.model.layers[str(layer)] = torch.nn.ModuleDict({"mlp": mlp})
    return model


def test_a_layer_without_a_map_gets_the_table_of_neighbours() -> None:
    """And one with a map from a file keeps its own."""
    mine, copies = torch.tensor([-1, -1, 0, 1], dtype=torch.int32), torch.tensor([3, 0])
    made = with_table(lambda *_, **__: (None, mine, None, 0))("config", 1, tp_size=2)
    assert made[:2] == (None, mine) and made[3] == 0
    assert made[2].tolist() == [0, 1, 2, 3] and made[2].dtype == torch.int32
    assert with_table(lambda: (None, mine, copies, 5))() == (None, mine, copies, 5)
    assert with_table(lambda: (None, None, None, 0))() == (None, None, None, 0), "no spread experts"


def test_a_table_says_the_slot_of_each_expert_and_changes_in_place() -> None:
    first, second = table(), table()
    place_experts(model_of(first, second), ((FIRST, (3, 0, 2, 1)),), 1, 2)
    assert first.tolist() == [1, 3, 2, 0], "expert 3 is in slot 0"
    assert second.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tables", "slots"),
    [((None, None), (0, 1, 2, 3)), ((torch.arange(4), torch.arange(4)), (0, 1, 2, 3, 0, 1))],
)
def test_a_layer_without_such_a_table_is_an_error(tables: Any, slots: Any) -> None:
    with pytest.raises(RuntimeError, match=f"layer {FIRST}: .* no table of {len(slots)} experts"):
        place_experts(model_of(*tables), ((FIRST, slots),), 0, 2)
    with pytest.raises(RuntimeError, match="layer 1"):
        place_experts(model_of(*tables), ((1, slots),), 0, 2)


def test_tokens_count_for_the_experts_in_the_slots_of_the_rank() -> None:
    """Numbers of each, or sums up to each; by layer; by the places at the time; taken once."""
    model = model_of(table(), table())
    load = ComputedExperts(model, LAYERS, LAYOUT, rank=3, device=torch.device("cpu"))
    layers = [model.model.layers[str(n)]["mlp"].experts for n in LAYERS]
    layers[0].quant_method.apply([5, 2], group_list_type=1)
    layers[0].quant_method.apply(tokens=[1, 4], group_list_type=0)
    told = layers[1].quant_method.apply([0, 7], group_list_type=1)
    assert told.expert_tokens.tolist() == [0, 7], "the result is that of the method"
    assert load.take().tolist() == [[0, 0, 6, 5], [0, 0, 0, 7]]
    place_experts(model, ((SECOND, (2, 3, 1, 0)),), 1, 2)
    layers[1].quant_method.apply([4, 9], group_list_type=1)
    assert load.take().tolist() == [[0] * 4, [9, 4, 0, 0]]


def test_a_layer_that_does_not_count_is_an_error() -> None:
    model = model_of(table(), None)
    with pytest.raises(RuntimeError, match=f"layer {SECOND}: .* no experts whose tokens count"):
        ComputedExperts(model, LAYERS, LAYOUT, 0, torch.device("cpu"))
