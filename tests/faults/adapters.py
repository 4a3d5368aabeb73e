"""Adapters that are merged, reduced, switched off or loaded wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from faults.planting import Fault, gives, skipped

_WORLD = "tests/distributed/test_adapters.py::test_adapters"
_SAVED = "tests/distributed/test_adapters.py::test_checkpoints_hold_adapters_alone[tp2-one]"
_MODULES = "mindspeed_rl.adapters.modules:"


def _last_first(runs: Any) -> Any:
    """The rows of a fused parameter with those of its last HF tensor first."""
    return (*runs[1:], runs[0])


def _of_one_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values, group: values


def _still_on(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: nullcontext()


def _of_the_base(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, name: self._base[name]


def _of_the_rank_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(factor: Any, weight: Any, is_expert: bool) -> None:
        original(factor, weight, False)

    return changed


def _marked_as_the_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(factor: Any, weight: Any, is_expert: bool) -> None:
        original(factor, weight, is_expert)
        factor.sequence_parallel = getattr(weight, "sequence_parallel", False)

    return changed


ADAPTERS = (
    Fault("adapter-on-the-rows-of-another-projection", _MODULES + "_row_order", gives(_last_first),
          _WORLD + "[one]",
          "The adapter of the queries would be added to keys; shapes fit where sizes are equal."),
    Fault("adapter-gradients-of-one-tensor-parallel-rank",
          _MODULES + "copy_to_tensor_model_parallel_region", _of_one_rank, _WORLD + "[tp2]",
          "Copies of an adapter would drift apart, each with a part of the gradient."),
    Fault("adapter-of-a-copied-weight-marked-for-a-second-sum", _MODULES + "_mark",
          _marked_as_the_weight, _WORLD + "[latent-tp2]",
          "megatron-core would sum gradients over the ranks again that are sums already."),
    Fault("reference-with-the-adapters-on", _MODULES + "Adapters.off", _still_on,
          _WORLD + "[one]",
          "The KL would be to the policy itself, and so always 0."),
    Fault("engine-gets-the-base", _MODULES + "MergedWeights.__getitem__", _of_the_base,
          _WORLD + "[one]",
          "The engine would sample from the base for ever; both sides would have equal checksums."),
    Fault("norm-without-the-experts-of-other-ranks", _MODULES + "_mark", _of_the_rank_alone,
          _WORLD + "[tp2-ep2]",
          "Gradients would be clipped by too small a norm."),
    Fault("adapters-loaded-onto-another-base",
          "mindspeed_rl.checkpoint.compatibility:_check_adapters", skipped, _SAVED,
          "A resumed run would add its adapters to weights that they were not trained on."),
)  # fmt: skip
