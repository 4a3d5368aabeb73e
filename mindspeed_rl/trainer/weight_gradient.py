"""Adds the gradient of the output projection to the buffer of gradients itself.

megatron-core's DistributedDataParallel keeps the gradients of a step in ``main_grad``, fp32, and
adds the gradient of every micro-batch to it. Autograd would hand it over as a matrix of the
weight's size and precision. Here the products of blocks are added to ``main_grad`` as they are
computed, and no such matrix is computed; ``--overlap-grad-reduce`` allocates one that nobody reads.

Source of the protocol: megatron-core 0.16.1, ``tensor_parallel/layers.py`` and
``distributed/distributed_data_parallel.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How the gradient of a weight gets to where it is kept.

    Attributes:
        fused: Whether Apex's kernel adds a product to the buffer
            (``--gradient-accumulation-fusion``).
        overlaps: Whether DistributedDataParallel reduces gradients during the backward pass. Its
            hook then insists on a gradient of every weight.
    """

    fused: bool = False
    overlaps: bool = False

    def begin(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the fp32 matrix that products are added to: ``main_grad``, else a new one."""
        found: torch.Tensor | None = getattr(weight, "main_grad", None)
        return torch.zeros_like(weight, dtype=torch.float32) if found is None else found

    def product(
        self,
        total: torch.Tensor,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        part: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add ``grad^T hidden`` to ``total``, or to the part of it that is not yet in it.

        A micro-batch's products are summed before they are added to those of others: the sum is
        then that of autograd, to the bit.

        Args:
            total: [v, h] fp32, the rows of the matrix that a block of ids belongs to.
            grad: [n, v] gradients of logits.
            hidden: [n, h] hidden states.
            part: [v, h], the sum of the products before, if any.

        Returns:
            What is not yet in ``total``.
        """
        if self.fused and total.dtype == torch.float32:
            kernels = import_module("fused_weight_gradient_mlp_cuda")
            kernels.wgrad_gemm_accum_fp32(hidden, grad, total)
            return None
        product = grad.t() @ hidden
        return product.to(total.dtype) if part is None else part.add_(product)

    def end(self, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """Return what the backward pass gives to autograd for the weight.

        Nothing, where the gradient is in ``main_grad`` already. A tied embedding on the same stage
        has a gradient of its own, which autograd adds. Where gradients are reduced during the
        backward pass, another weight gets a matrix whose values nobody reads.
        """
        if not hasattr(weight, "main_grad"):
            return total.to(weight.dtype)
        if not self.overlaps or getattr(weight, "zero_out_wgrad", False):
            return None
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(weight)
