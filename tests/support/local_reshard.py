"""Reshards of whole worlds in one process, by the product's own plans and executor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import numpy as np
import torch
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_oracle import megatron_params, vllm_params
from support.local_transport import LocalTransport, LocalWorld
from support.tensor_tracker import TensorTracker

from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weights.executor import ROUNDS_IN_FLIGHT, Resharder
from mindspeed_rl.weights.schedule import Schedule, plan_schedule

ITEM_BYTES = 4
UNTOUCHED = -7


def schedule_of(
    case: Case, source: ShardLayout, target: ShardLayout, round_bytes: int, relay: bool = False
) -> Schedule:
    """The rounds of a reshard of int32 tensors, each within ``round_bytes``."""
    return plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes,
        item_bytes=ITEM_BYTES,
        ranks_per_node=case.ranks_per_node,
        relay=relay,
    )


def smallest_round(case: Case, source: ShardLayout, target: ShardLayout, relay: bool) -> int:
    """At most twice the smallest size of a round that is accepted, so that there are many."""
    size = 16
    while True:
        try:
            schedule_of(case, source, target, size, relay)
        except ValueError:
            size *= 2
        else:
            return size


def smallest_bucket(case: Case, source: ShardLayout, target: ShardLayout, relay: bool) -> int:
    """The same for all rounds that are on their way at once."""
    return ROUNDS_IN_FLIGHT * (smallest_round(case, source, target, relay) + 16)


def tensors(params: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Arrays as tensors of their own."""
    return {name: torch.from_numpy(np.array(array)) for name, array in params.items()}


def move(
    case: Case,
    source: ShardLayout,
    target: ShardLayout,
    bucket_bytes: int,
    relay: bool = False,
    many_messages: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Run the executor on all ranks; every rank's target parameters.

    Its traffic is that of its plan, one collective per round and hop after one comparison of plans,
    and all tensors that it makes are within the bucket.
    """
    hf = hf_arrays(case)

    def one_rank(rank: int, transport: LocalTransport) -> dict[str, torch.Tensor]:
        transport.many_messages = many_messages
        resharder = Resharder(
            source,
            target,
            rank=rank,
            ranks_per_node=case.ranks_per_node,
            transport=transport,
            dtype=torch.int32,
            bucket_bytes=bucket_bytes,
            relay=relay,
        )
        shapes = target.local_shapes(rank)
        write = {n: torch.full(shape, UNTOUCHED, dtype=torch.int32) for n, shape in shapes.items()}
        read = tensors(megatron_params(case, hf, rank))
        tracker = TensorTracker()
        with tracker if case.world <= 16 else nullcontext():  # it takes its time
            resharder.run(read, write)
        traffic = resharder.traffic
        assert transport.sent_bytes == traffic.send_bytes
        assert transport.received_bytes == traffic.receive_bytes
        assert transport.num_gathers == 1
        assert transport.num_exchanges == len(resharder.rounds) * (2 if relay else 1)
        assert tracker.peak_bytes <= bucket_bytes
        return write

    return LocalWorld(case.world).run(one_rank)


def assert_arrived(case: Case, moved: list[dict[str, torch.Tensor]]) -> None:
    """Bit-equal to slicing by hand, padding untouched."""
    hf = hf_arrays(case)
    for rank, written in enumerate(moved):
        for name, wanted in vllm_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(written[name].numpy(), expected, f"{rank} {name}")
