"""Whole HF tensors, one after another, on the ranks that ask for them.

The way into an engine's own loading code, and out into files: wherever parameters cannot be written
in place. Every tensor travels whole to every receiver, so it costs receivers x model bytes where
the direct path costs each rank its own share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mindspeed_rl.weights.exchange import Round
from mindspeed_rl.weights.executor import Resharder, wire_dtype
from mindspeed_rl.weights.layouts.base import ShardLayout
from mindspeed_rl.weights.layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.sync_metrics import SyncTraffic
from mindspeed_rl.weights.transports import Transport


class TensorStream:
    """A prepared stream on this rank.

    Args:
        source: the layout to read.
        receivers: the ranks that get every tensor.
        rank: global rank.
        ranks_per_node: for the choice of near sources.
        transport: moves the messages.
        dtype: element type of tensors that have none of their own.
        bucket_bytes: bound of the staging of a rank; the whole tensors of the two rounds on their
            way come on top.
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
    ) -> SyncTraffic:
        """Call ``deliver(name, tensor)`` on every receiver for every HF tensor, as they come.

        Collective over the transport's ranks. The tensor belongs to ``deliver``, which only the
        receivers have. Returns what this rank moved.
        """
        if deliver is None:
            assert not self._receives, "a receiver must take its tensors"
            return self.resharder.run(read, {})
        tensors = _WholeTensors(self._target, self._dtype, self._device)

        def complete(part: Round) -> None:
            for name in part.names:
                deliver(name, tensors.pop(name))

        return self.resharder.run(read, tensors, after_round=complete)


class _WholeTensors(dict[str, torch.Tensor]):
    """Tensors that exist from their first rectangle until they are delivered."""

    def __init__(self, layout: HfFileLayout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._layout, self._dtype, self._device = layout, dtype, device

    def __missing__(self, name: str) -> torch.Tensor:
        dtype = wire_dtype(self._layout.dtype_of(name), self._dtype)
        self[name] = torch.empty(self._layout.shape_of(name), dtype=dtype, device=self._device)
        return self[name]
