"""Linear layers and norms: parameters and marks of Transformer Engine 2.11, in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

# how many of each class were made
MADE: Counter[str] = Counter()


def _normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (exact * weight.float()).to(x.dtype)


class RMSNorm(torch.nn.Module):
    """``weight`` [h]."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        MADE["RMSNorm"] += 1
        assert (normalized_shape is None) != (hidden_size is None) and not zero_centered_gamma
        self.eps = eps
        size = hidden_size if normalized_shape is None else normalized_shape
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=params_dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In fp32."""
        return _normalized(x, self.weight, self.eps)


class _Linear(torch.nn.Module):
    """What linear layers share: sizes, marks, and communication of tensor parallelism.

    Options that a CPU has no use for are taken and left alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        bias: bool = True,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        **unused: Any,
    ) -> None:
        super().__init__()
        MADE[next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)] += 1
        assert not fuse_wgrad_accumulation and not return_bias
        assert parallel_mode in ("row", "column", None)
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self._group, self._init = tp_group, init_method
        self._where: dict[str, Any] = {"device": device, "dtype": params_dtype}
        for number in self._numbers():
            self._add_weight(f"weight{number}")
            self._add_bias(f"bias{number}")

    def _numbers(self) -> Iterable[int | str]:
        """What follows the names of weights."""
        return ("",)

    def _add_weight(self, name: str) -> None:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **self._where))
        if self._init is None:
            torch.nn.init.normal_(weight, 0.0, 0.023)
        else:
            self._init(weight)
        # of every weight, cut or not
        weight.tensor_model_parallel = True
        weight.partition_dim = int(self.parallel_mode == "row")
        weight.partition_stride = 1
        self.register_parameter(name, weight)

    def _add_bias(self, name: str) -> None:
        if not self.use_bias:
            setattr(self, name, torch.empty(0, **self._where))
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._where))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel
        elif self.parallel_mode == "column":
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
        self.register_parameter(name, bias)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(x, group=self._group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self._group)

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode != "row" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(x, group=self._group)
        return mappings.reduce_from_tensor_model_parallel_region(x, group=self._group)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(self._gathered(x), self.weight)
        product = self._reduced(product)
        return product + self.bias if self.use_bias else product


class Linear(_Linear):
    """``weight`` [out, in] and ``bias`` [out]."""

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self._product(inp)


class LayerNormLinear(_Linear):
    """``layer_norm_weight`` [in], ``weight`` [out, in] and ``bias`` [out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm" and not zero_centered_gamma
        assert not return_layernorm_output
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, **self._where))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """[..., in] -> [..., out]; the norm is taken before the sequence is gathered."""
        return self._product(_normalized(inp, self.layer_norm_weight, self.eps))


class GroupedLinear(_Linear):
    """``weight0`` [out, in] ... of as many products."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)

    def _numbers(self) -> Iterable[int | str]:
        return range(self.num_gemms)

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], ``m_splits`` tokens of each product."""
        parts = inp.split(list(m_splits))
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return torch.cat([F.linear(x, w) for x, w in zip(parts, weights, strict=True)])


class DotProductAttention(torch.nn.Module):
    """Of which megatron-core makes a class; the trainer has an attention of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError
