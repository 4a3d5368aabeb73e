"""Modules that compute with merged weights in place of their own, wherever they read these."""

from __future__ import annotations

from typing import Any, cast

import torch

from mindspeed_rl.adapters.modules import with_merged


class ListedExperts(torch.nn.Module):
    """Experts as MindSpeed's TEGroupedLinear has them: parameters by number, read from a list."""

    total_weight_T: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.total_weight = []
        for number in range(3):
            weight = torch.nn.Parameter(torch.full((2, 2), 1.0 + number), requires_grad=False)
            self.register_parameter(f"weight{number}", weight)
            self.total_weight.append(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total_weight_T = [w.T for w in self.total_weight]
        return torch.stack([x @ w for w in self.total_weight_T]).sum(0)


class AddedFactor:
    """An adapter of one number, added to all elements of the weights that it knows."""

    def __init__(self, module: ListedExperts) -> None:
        self.is_on = True
        self.factor = torch.nn.Parameter(torch.tensor(0.25))
        self._weights = {f"experts.{n}": w for n, w in module.named_parameters()}

    def merged(self, name: str) -> torch.Tensor:
        return self._weights[name] + self.factor


def test_experts_that_are_read_from_a_list_have_adapters_too() -> None:
    """Those without an adapter keep their weights; nothing merged stays behind the pass."""
    module = ListedExperts()
    adapters, own = AddedFactor(module), list(module.total_weight)
    names = {"weight0": "experts.weight0", "weight2": "experts.weight2"}
    forward = with_merged(module, module.forward, cast(Any, adapters), names)
    x = torch.ones(1, 2)
    found = forward(x)
    assert found.tolist() == [[2 * (1.25 + 2.0 + 3.25)] * 2]
    found.sum().backward()
    assert float(cast(torch.Tensor, adapters.factor.grad)) == 2 * 2 * 2
    assert module.total_weight_T is None
    assert all(a is b for a, b in zip(module.total_weight, own, strict=True))
    assert "weight0" not in module.__dict__
    adapters.is_on = False
    assert forward(x).tolist() == [[12.0, 12.0]]
