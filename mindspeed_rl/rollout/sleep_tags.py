"""Memory that vLLM's own sleep mode gives away, by tag.

Its pool unmaps physical memory and keeps the addresses, so captured graphs stay valid. Tags are
discarded without a copy: weights come from the trainer at every update, the cache is empty. What
else the model keeps in the pool of its weights and no update writes (rotary tables, maps of
experts) is copied to the host once and written back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mindspeed_rl.offload.storages import num_bytes, storages_of

WEIGHTS, CACHE = "weights", "kv_cache"


class TagMemory:
    """The allocations of one tag.

    Args:
        executor: vLLM's; it discards and wakes tags, and knows which are away.
        tag: ``"weights"`` or ``"kv_cache"``.
        tensors: what the tag is for; what they hold is lost.
        kept: tensors of the tag whose content comes back; all hold it now.
        zero: whether the tensors are cleared when they are back.
    """

    def __init__(
        self,
        executor: Any,
        tag: str,
        tensors: Iterable[torch.Tensor],
        kept: Iterable[torch.Tensor] = (),
        *,
        zero: bool = False,
    ) -> None:
        self._executor, self._tag = executor, tag
        self._tensors = list(tensors)
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]
        self._zero = zero
        self.num_bytes = num_bytes(storages_of(self._tensors))

    def free(self) -> None:
        """Unmap it; no effect when it is away."""
        if self._tag not in self._executor.sleeping_tags:
            self._executor.discard((self._tag,))

    @torch.no_grad()
    def bring_back(self) -> None:
        """Map it where it was; no effect when it is there."""
        if self._tag not in self._executor.sleeping_tags:
            return
        self._executor.wake_up([self._tag])
        for tensor, content in self._kept:
            tensor.copy_(content)
        for tensor in self._tensors if self._zero else ():
            tensor.zero_()


def constants_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors of the modules that are no parameters: buffers, and plain attributes."""
    parameters = {id(p) for p in model.parameters()}
    found: dict[int, torch.Tensor] = {id(b): b for b in model.buffers()}
    for module in model.modules():
        for value in _tensors(tuple(vars(module).values())):
            if id(value) not in parameters:
                found[id(value)] = value
    return list(found.values())


def _tensors(values: Sequence[Any]) -> Iterable[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor) and not v.is_meta]
