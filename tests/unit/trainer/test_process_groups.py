"""Groups are listed with their buffers; their owner alone destroys and replaces them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch.distributed as dist
from megatron.core import parallel_state as megatron_state
from megatron.core import tensor_parallel
from support.table_engine import single_rank

from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.platforms.process_groups import (
    ExistingGroup,
    existing_groups,
    group_lines,
    process_groups,
)
from mindspeed_rl.trainer import parallel_state


def test_groups_of_this_process_are_found_by_name() -> None:
    with single_rank():
        mine = dist.new_group([0], group_desc="EXPERT_PARALLEL_GROUP")
        engines = dist.new_group([0])
        found = existing_groups()
        dist.destroy_process_group(engines)
        dist.destroy_process_group(mine)
        left = existing_groups()
    assert [group.name for group in found] == ["world", "expert_parallel_group", "engine"]
    assert {group.ranks for group in found} == {(0,)}
    assert all("gloo" in group.backend for group in found)
    assert found[:1] == left


def test_equal_groups_are_reported_together_and_buffers_counted_for_devices_only() -> None:
    groups = [
        ExistingGroup("world", tuple(range(8)), "cpu:gloo,npu:hccl"),
        ExistingGroup("tp", (0, 1), "hccl"),
        ExistingGroup("ep", (0, 1), "hccl"),
        ExistingGroup("dp", (0, 2, 4, 6), "hccl"),
        ExistingGroup("data_gloo", (0, 2, 4, 6), "gloo"),
        ExistingGroup("pp", (0,), "hccl"),
    ]
    buffers = {"world": 400 << 20, "tp": 128 << 20}
    assert list(group_lines(groups, buffers, listed=True)) == [
        "process groups of this rank: 6, 5 of more than one rank",
        "  0-7 cpu:gloo,npu:hccl: world",
        "  0,1 hccl: tp, ep",
        "  0-6/2 hccl: dp",
        "  0-6/2 gloo: data_gloo",
        "  device buffers: 528 MiB, of groups in use: world 400, tp 128",
    ]
    assert list(group_lines(groups[4:], {}, listed=True))[-1] == "  device buffers: 0 MiB"
    assert list(group_lines(groups, buffers, listed=False)) == [
        "device buffers of process groups: 528 MiB, of those in use: world 400, tp 128"
    ]
    assert list(group_lines(groups, {}, listed=False)) == []


def test_groups_of_a_layout_are_destroyed_with_it_and_others_stay() -> None:
    layout = ParallelLayout.build(world=1, stages=even_stages(1, 1))
    with single_rank():
        engines = dist.new_group([0])
        before = process_groups()
        for _ in range(2):
            with mock.patch.object(tensor_parallel, "model_parallel_cuda_manual_seed"):
                parallel_state.initialize(layout, seed=1, timeout_minutes=7)
            created = [group for group in process_groups() if group not in before]
            assert megatron_state.get_tensor_model_parallel_group() in created
            parallel_state.forget()
            assert process_groups() == before == [dist.group.WORLD, engines]


def _replace_group() -> None:
    megatron_state._TENSOR_MODEL_PARALLEL_GROUP = dist.new_group([0])


def _change_in_place() -> None:
    megatron_state._DATA_PARALLEL_GLOBAL_RANKS.append(7)


def _destroy() -> None:
    megatron_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("touch", "named"),
    [
        (_replace_group, "_TENSOR_MODEL_PARALLEL_GROUP;"),
        (_change_in_place, "_DATA_PARALLEL_GLOBAL_RANKS;"),
        (_destroy, "more;"),
    ],
)
def test_an_engine_that_touches_the_trainers_groups_is_caught(
    touch: Callable[[], None], named: str
) -> None:
    with single_rank():
        megatron_state.initialize_model_parallel(create_gloo_process_groups=False)
        try:
            with parallel_state.unchanged("building the rollout engine"):
                dist.new_group([0])  # groups of its own are its own affair
            with (
                pytest.raises(RuntimeError, match=named),
                parallel_state.unchanged("building the rollout engine"),
            ):
                touch()
        finally:
            megatron_state.destroy_model_parallel()
