"""Where numbers that are not finite begin, in a model of this process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mindspeed_rl.algorithms.types import LossOutputs
from mindspeed_rl.trainer.nonfinite import NonFiniteTrace, Origin, description


class Layer(nn.Module):
    """A residual layer: two linear maps with a square root between them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.up = nn.Linear(4, 6)
        self.root = Root()
        self.down = nn.Linear(6, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(self.root(self.up(hidden).abs() + 0.1))
        return out


class Root(nn.Module):
    """sqrt(x), which is 0 with an infinite gradient where ``at_zero``."""

    at_zero = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values * (0.0 if self.at_zero else 1.0)).sqrt()


class Chunk(nn.Module):
    """The layers of one stage."""

    def __init__(self, first: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(first), Layer(first + 1), Layer(first + 2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@dataclass(frozen=True)
class Inputs:
    logprobs: torch.Tensor
    advantages: torch.Tensor


def traced(
    chunk: Chunk, *, is_last: bool = True, advantage: float = 1.0, hidden: float = 1.0
) -> Origin | None:
    """Two micro-batches, forward and backward."""
    torch.manual_seed(3)
    trace = NonFiniteTrace([chunk], [4], is_last)
    with trace.watching():
        for _ in range(2):
            out = chunk(torch.randn(5, 4) * hidden)
            loss = (out * advantage).sum()
            if is_last:
                trace.see_loss(Inputs(out, torch.tensor([advantage])), LossOutputs(loss, {}))
            loss.backward()
    for module in chunk.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    return trace.found


def test_a_sound_pass_has_no_origin() -> None:
    torch.manual_seed(0)
    assert traced(Chunk()) is None


def test_a_broken_weight_is_named_with_its_layer() -> None:
    torch.manual_seed(0)
    chunk = Chunk(first=7)
    with torch.no_grad():
        chunk.layers[1].down.weight[2, 3] = torch.nan
        chunk.layers[2].up.weight[0, 0] = torch.nan  # later
    found = traced(chunk)
    assert found is not None and not found.backward
    assert found.where == "layers.1.down (layer 8 of the model, counted from 1)"
    assert (found.micro, found.part, found.spread) == (0, 4, 0)
    assert "what comes out holds 5 nan and 0 inf of 20" in found.text
    assert "its weight holds 1 nan and 0 inf of 24" in found.text


def test_finite_weights_that_overflow_are_named_as_well() -> None:
    torch.manual_seed(0)
    chunk = Chunk()
    with torch.no_grad():
        chunk.layers[2].up.weight.fill_(3e38)
    found = traced(chunk, hidden=100.0)
    assert found is not None and found.where.startswith("layers.2.up (layer 3 ")
    assert found.spread == 1 and "its weight" not in found.text


def test_what_another_stage_sent_does_not_begin_here() -> None:
    torch.manual_seed(0)
    assert traced(Chunk(), hidden=float("nan")) is None


@pytest.mark.parametrize("layer", [0, 2])
def test_the_module_whose_backward_pass_breaks_is_named(layer: int) -> None:
    """sqrt at 0: all outputs are finite, the slope is not."""
    torch.manual_seed(0)
    chunk = Chunk()
    chunk.layers[layer].root.at_zero = True
    found = traced(chunk, is_last=False)
    assert found is not None and found.backward
    assert found.where.startswith(f"layers.{layer}.root (layer {layer + 1} ")
    assert f"the gradient that reaches layers.{layer}.up" in found.text


def test_the_loss_is_named_with_what_it_was_given() -> None:
    torch.manual_seed(0)
    found = traced(Chunk(), advantage=float("inf"))
    assert found is not None and found.where == "the loss" and not found.backward
    assert "advantages holds 0 nan and 1 inf of 1" in found.text


def test_a_gradient_that_the_next_stage_sent_does_not_begin_here() -> None:
    torch.manual_seed(0)
    chunk = Chunk()
    trace = NonFiniteTrace([chunk], [0], False)
    with trace.watching():
        chunk(torch.randn(5, 4)).backward(torch.full((5, 4), torch.nan))
    assert trace.found is None


def origin(*, backward: bool = False, part: int = 0, order: int = 1, spread: int = 1) -> Origin:
    return Origin(backward, 0, part, order, spread, f"module {part}.{order}", "seen")


def test_the_earliest_of_all_ranks_is_named() -> None:
    """A forward pass before a backward one; of ranks alike the one with broken weights."""
    none: list[list[str]] = [[], [], []]
    told = description([origin(part=1), origin(backward=True), origin(order=3)], none, 1.0)
    assert "begin on rank 2, in the forward pass of micro-batch 0, in module 0.3: seen" in told
    told = description([origin(), origin(spread=0), origin()], none, 1.0)
    assert "on rank 1," in told
    assert "on rank 0-2," in description([origin()] * 3, none, 1.0)
    last = [origin(backward=True, part=-1), origin(backward=True, part=-2), None]
    assert "on rank 1, in the backward pass, in module -2.1" in description(last, none, 1.0)


def test_what_no_module_shows_is_told_as_it_is() -> None:
    none = [None, None]
    assert "a second pass" in description(none, [[], []], 2.5)
    told = description(none, [[], ["layers.0.up.weight"]], float("inf"))
    assert "layers.0.up.weight on rank 1 is not" in told
    assert "squares" in description(none, [[], []], float("inf"))
