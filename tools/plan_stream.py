"""`stream` in the product's own rounds, where planning it takes seconds; else in full buckets."""

from __future__ import annotations

from dataclasses import replace

from bench.peer_volumes import Volumes

from mindspeed_rl.resharding.executor import ROUNDS_IN_FLIGHT, round_bytes
from mindspeed_rl.resharding.layouts.base import ShardLayout
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.planner import plan_reshard
from mindspeed_rl.resharding.schedule import Schedule, plan_schedule
from mindspeed_rl.resharding.traffic import ElementBytes, RoundTraffic, round_traffic

# HF tensors x ranks: every tensor travels to every rank, in slices that grow with their number.
_MOST_TO_PLAN = 1 << 19


def is_planned(source: ShardLayout, world: int) -> bool:
    """Whether the rounds are worth planning: beyond, they take minutes, and nobody streams."""
    return len(source.hf_shapes) * world <= _MOST_TO_PLAN


def rounds_of_stream(
    source: ShardLayout,
    files: HfFileLayout,
    *,
    rank: int,
    bucket_bytes: int,
    item_bytes: int,
    ranks_per_node: int,
    bytes_of: ElementBytes,
) -> tuple[Schedule, RoundTraffic]:
    """What ``TensorStream`` would plan on a rank."""
    plan = plan_reshard(source, files, rank, ranks_per_node)
    schedule = plan_schedule(
        source,
        files,
        bucket_bytes=round_bytes(bucket_bytes),
        item_bytes=item_bytes,
        ranks_per_node=ranks_per_node,
    )
    return schedule, round_traffic(plan, schedule, source, bytes_of)


def whole_tensor_bytes(schedule: Schedule, source: ShardLayout, bytes_of: ElementBytes) -> int:
    """The most that lies about of tensors that have begun and are not delivered.

    A round's own copies are made while the round before it is still on its way.
    """
    change = [0] * (schedule.num_rounds + 2)
    for number, names in enumerate(schedule.completed):
        for name in names:
            shape, size = source.shape_of(name), bytes_of(name)
            for length in shape:
                size *= length
            first = schedule.slots_of(source, name)[0].round
            change[max(0, first - 1)] += size
            change[number + 1] -= size
    most = held = 0
    for size in change:
        held += size
        most = max(most, held)
    return most


def with_planned_rounds(
    volumes: Volumes, schedule: Schedule, traffic: RoundTraffic, whole_bytes: int
) -> Volumes:
    """The closed form's bytes with the rounds, messages and staging of a plan."""
    in_flight = min(ROUNDS_IN_FLIGHT, schedule.num_rounds)
    return replace(
        volumes,
        peak_staging_bytes=in_flight * traffic.peak_bytes + whole_bytes,
        messages_per_rank=float(traffic.num_messages),
        collectives=schedule.num_rounds,
    )
