"""A stream of whole HF tensors to the ranks that ask for them.

It feeds an engine's own loading code and the writers of files, wherever parameters cannot be
written in place. Every tensor travels whole to every receiver, so the stream costs receivers x
model bytes, where the direct path sends each rank only what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.exchange import Round
from mindspeed_rl.weights.executor import Resharder, wire_dtype
from mindspeed_rl.weights.transports import Transport


class TensorStream:
    """A prepared stream on this rank.

    Args:
        source: Layout to read.
        receivers: Ranks that get every tensor.
        rank: Global rank.
        ranks_per_node: Number of ranks per node; sources on the same node are preferred.
        transport: Transport that moves the messages.
        dtype: Element type of tensors that declare none.
        bucket_bytes: Bound of the staging of a rank; the whole tensors of the two rounds in flight
            come on top.
    """

    def __init__(
        self,
        source: ShardLayout,
        receivers: range,
        *,
        rank: int,
        ranks_per_node: int,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        self._target = HfFileLayout.of(source, receivers)
        self._receives = rank in receivers
        self._dtype = dtype
        self._device = transport.device
        self.resharder = Resharder(
            source,
            self._target,
            rank=rank,
            ranks_per_node=ranks_per_node,
            transport=transport,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
        )

    def run(
        self,
        read: Mapping[str, torch.Tensor],
        deliver: Callable[[str, torch.Tensor], None] | None,
    ) -> None:
        """Call ``deliver(name, tensor)`` on every receiver for every HF tensor, as tensors arrive.

        Collective over the transport's ranks. The tensor belongs to ``deliver``, which only the
        receivers have.
        """
        if deliver is None:
            assert not self._receives, "a receiver must take its tensors"
            self.resharder.run(read, {})
            return
        tensors = _WholeTensors(self._target, self._dtype, self._device)

        def complete(part: Round) -> None:
            for name in part.names:
                deliver(name, tensors.pop(name))

        self.resharder.run(read, tensors, after_round=complete)


class _WholeTensors(dict[str, torch.Tensor]):
    """Tensors that are allocated for their first rectangle and removed when they are delivered."""

    def __init__(self, layout: HfFileLayout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._layout, self._dtype, self._device = layout, dtype, device

    def __missing__(self, name: str) -> torch.Tensor:
        dtype = wire_dtype(self._layout.dtype_of(name), self._dtype)
        self[name] = torch.empty(self._layout.shape_of(name), dtype=dtype, device=self._device)
        return self[name]
