"""Renews engine state computed from weights: packed experts and absorbed latent projections.

The CPU engine keeps experts in the block order of its kernel, in the storage of the parameter
itself; latent attention keeps two products of its key/value up projection. Both are computed
exactly once per update: between :meth:`DerivedState.begin` and :meth:`DerivedState.finish` expert
parameters are plain ``[experts, rows, columns]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_EXPERT_PARAMS = ("w13_weight", "w2_weight")
# Parameters that vLLM computes from others.
DERIVED_PARAMS = (".W_UV", ".W_UK_T")


class DerivedState:
    """The derived state of one built model on this rank.

    Args:
        model: vLLM's model.
        dtype: Type of its activations.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._packed = list(_packed_experts(model))
        self._latent = [m for m in model.modules() if type(m).__name__ == "MLAAttention"]

    @property
    def packs_experts(self) -> bool:
        return bool(self._packed)

    def views(self, params: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the parameters unchanged, because all of them are plain within an update."""
        return params

    def begin(self) -> None:
        """Make expert parameters plain by zeroing them; the update writes all of them."""
        for layer, _ in self._packed:
            for name in _EXPERT_PARAMS:
                getattr(layer, name).data.zero_()

    def finish(self) -> None:
        """Pack experts and derive latent projections from the weights that were written."""
        for layer, isa in self._packed:
            for name in _EXPERT_PARAMS:
                _pack(getattr(layer, name).data, isa)
        for attention in self._latent:
            attention.process_weights_after_loading(self._dtype)  # type: ignore[operator]


def _packed_experts(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield layers whose experts the CPU engine packed, and the kernel's instruction set."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        isa = getattr(getattr(kernel, "fused_experts", None), "isa", None)
        if isa is not None and hasattr(module, "w13_weight"):
            yield module, str(isa)


def _pack(weight: torch.Tensor, isa: str) -> None:
    """Pack the weight in place, one expert at a time."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    for expert in weight:
        expert.copy_(cpu_prepack_moe_weight(expert[None].contiguous(), isa)[0])
