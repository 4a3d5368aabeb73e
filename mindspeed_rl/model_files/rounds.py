"""Execution of rounds of slices, with two of them in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mindspeed_rl.model_files.slices import PartsOf, RoundSlices, RowSlice, messages_of
from mindspeed_rl.weights.exchange import Exchange, Params, copy_within
from mindspeed_rl.weights.planner import Transfer
from mindspeed_rl.weights.transports import Transport


@torch.no_grad()
def gather_rows_of_files(
    rounds: Sequence[RoundSlices],
    parts_of: PartsOf,
    rank: int,
    params: Params,
    transport: Transport,
    deliver: Callable[[RowSlice, torch.Tensor], None],
) -> None:
    """Call ``deliver(rows, values)`` on their rank for all slices. Collective: the transport.

    Args:
        rounds: Slices of all ranks, by round.
        parts_of: What travels for a slice.
        rank: Global rank.
        params: Parameters of this rank by name.
        transport: Transport of the messages.
        deliver: Function that takes whole rows, on the transport's device.
    """
    on_the_way: tuple[Exchange, dict[str, torch.Tensor], Sequence[RowSlice]] | None = None

    def finish() -> None:
        if on_the_way is not None:
            exchange, buffers, several = on_the_way
            exchange.finish(None)
            for rows in several:
                deliver(rows, buffers.pop(rows.key))

    for slices in rounds:
        mine = slices.get(rank, ())
        buffers = {s.key: _buffer(s, transport.device) for s in mine}
        started, copies = _exchange(
            slices, parts_of, rank, transport, params, buffers, gathers=True
        )
        copy_within(copies, params, buffers)
        finish()
        on_the_way = started, buffers, mine
    finish()


@torch.no_grad()
def scatter_rows_of_files(
    rounds: Sequence[RoundSlices],
    parts_of: PartsOf,
    rank: int,
    params: Params,
    transport: Transport,
    read: Callable[[RowSlice], torch.Tensor],
) -> None:
    """Fill parameters with the rows that ranks read. Collective: the transport.

    Args:
        rounds: Slices of all ranks, by round.
        parts_of: What travels for a slice.
        rank: Global rank.
        params: Parameters of this rank by name, written in place and cast to their types.
        transport: Transport of the messages.
        read: Function that reads rows, on the transport's device.
    """
    on_the_way: Exchange | None = None
    for slices in rounds:
        buffers = {s.key: read(s) for s in slices.get(rank, ())}
        started, copies = _exchange(
            slices, parts_of, rank, transport, buffers, params, gathers=False
        )
        copy_within(copies, buffers, params)
        if on_the_way is not None:
            on_the_way.finish(None)
        on_the_way = started
    if on_the_way is not None:
        on_the_way.finish(None)


def _buffer(rows: RowSlice, device: torch.device) -> torch.Tensor:
    return torch.empty(rows.box.size, dtype=getattr(torch, rows.dtype), device=device)


def _exchange(
    slices: RoundSlices,
    parts_of: PartsOf,
    rank: int,
    transport: Transport,
    source: Params,
    target: Params,
    *,
    gathers: bool,
) -> tuple[Exchange, Sequence[Transfer]]:
    part = messages_of(rank, slices, parts_of, gathers=gathers)
    dtype = getattr(torch, part.dtype)
    (hop,) = part.hops
    size = hop.staging_bytes(dtype.itemsize)
    staging = torch.empty(size, dtype=torch.uint8, device=transport.device)
    exchange = Exchange(part, staging, dtype, transport, target, float("inf"))
    exchange.post(0, source)
    return exchange, part.copies
