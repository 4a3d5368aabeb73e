"""Renews the derived state of a vLLM-Ascend model; the only code that transposes its experts.

Its kernels want ``w13 [experts, hidden, 2 x ffn]`` and ``w2 [experts, ffn, hidden]`` (kernel
layout), its loaders the transposes of both (loader layout). Loading transposes them once; waking
transposes them back, judging by their shape; and a transposed parameter has lost its loader. Here
the layout of every parameter is read off its strides, and an update transposes each of them to
loader layout and back exactly once. Both layouts are views of the same memory, so addresses stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

EXPERT_PARAMS = ("w13_weight", "w2_weight")


@dataclass(slots=True)
class ExpertParam:
    """One stacked expert parameter.

    Attributes:
        name: Full name of the parameter in the model.
        module: Module that owns the parameter.
        shape: Shape in kernel layout.
        address: Address of its memory.
    """

    name: str
    module: torch.nn.Module
    shape: torch.Size
    address: int

    @property
    def attribute(self) -> str:
        """Name of the parameter in its module."""
        return self.name.rpartition(".")[2]

    @property
    def value(self) -> torch.Tensor:
        """The parameter's tensor in its present layout."""
        return getattr(self.module, self.attribute).data  # type: ignore[no-any-return]

    @property
    def loadable(self) -> bool:
        """Whether the parameter is in loader layout, by its strides.

        Shapes do not decide it: with equal sizes both layouts have the same shape.

        Raises:
            RuntimeError: The parameter is in neither of the two layouts, or in other memory.
        """
        now = self.value
        kernel = torch.empty(self.shape, device="meta")
        for loadable, expected in ((False, kernel), (True, kernel.transpose(1, 2))):
            same = now.shape == expected.shape and _strides(now) == _strides(expected)
            if same and now.data_ptr() == self.address:
                return loadable
        raise RuntimeError(
            f"{self.name}: shape {tuple(now.shape)}, strides {now.stride()} at {now.data_ptr():#x} "
            f"is neither the kernel layout {tuple(self.shape)} at {self.address:#x} nor its "
            "transpose: the engine turned or moved it behind our back"
        )

    @property
    def kernel(self) -> torch.Tensor:
        """The same memory in kernel layout, contiguous."""
        return self.value.transpose(1, 2) if self.loadable else self.value


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the dimensions with several elements; other strides mean nothing."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


class AscendWeights:
    """The derived state of one built model on this rank, its experts and its latent attention.

    The engine's own processing renews all of it: it converts experts to kernel layout and computes
    the two products of latent attention from its key/value up projection.

    Args:
        model: Model after loading and processing, so that all experts are in kernel layout.
        process: Runs the engine's processing of the whole model after loading.
    """

    packs_experts = False

    def __init__(self, model: torch.nn.Module, process: Callable[[], None]) -> None:
        self._process = process
        self.params = [
            ExpertParam(name, module, value.shape, value.data_ptr())
            for name, module in _experts(model)
            if (value := getattr(module, name.rpartition(".")[2]).data).is_contiguous()
        ]
        assert len(self.params) == len(list(_experts(model))), "experts are not in kernel layout"

    def begin(self) -> None:
        """Put every expert parameter into loader layout and attach its loader."""
        for param in self.params:
            if not param.loadable:
                value = torch.nn.Parameter(param.value.transpose(1, 2), requires_grad=False)
                setattr(param.module, param.attribute, value)
            getattr(param.module, param.attribute).weight_loader = _loader(param)

    def finish(self) -> None:
        """Let the engine process its model, which converts every expert to kernel layout once.

        Raises:
            RuntimeError: A parameter was not converted, or was moved.
        """
        for param in self.params:
            assert param.loadable, f"{param.name}: finished without begin"
        self._process()
        for param in self.params:
            if param.loadable:
                raise RuntimeError(f"{param.name}: processing left it in loader layout")

    def views(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters, with experts in kernel layout whatever their present layout."""
        return {**params, **{param.name: param.kernel for param in self.params}}


def _experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for prefix, module in model.named_modules():
        if all(isinstance(getattr(module, name, None), torch.Tensor) for name in EXPERT_PARAMS):
            for name in EXPERT_PARAMS:
                yield (f"{prefix}.{name}" if prefix else name), module


def _loader(param: ExpertParam) -> Any:
    loader = getattr(param.module, "weight_loader", None)
    if loader is None:
        raise RuntimeError(f"{param.name}: its module has no weight_loader to attach")
    return loader
