"""Rank arithmetic of the training grid and the engines, and the merging of owner ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.layout import Coords, EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import StageLayout, even_stages, listed_stages
from mindspeed_rl.parallel.groups import rank_lists
from mindspeed_rl.weight_layouts.base import merge_owner_ranks

sizes = st.integers(1, 4)


def test_rank_order_is_megatrons_default() -> None:
    """tp-cp-ep-dp-pp of megatron-core: tensor-parallel neighbours, stages furthest apart."""
    layout = ParallelLayout.build(world=16, stages=even_stages(4, 2), tp=2, cp=2)
    assert layout.dp == 2
    assert layout.coords(1) == Coords(tp=1, cp=0, dp=0, pp=0)
    assert layout.coords(2) == Coords(tp=0, cp=1, dp=0, pp=0)
    assert layout.coords(4) == Coords(tp=0, cp=0, dp=1, pp=0)
    assert layout.coords(8) == Coords(tp=0, cp=0, dp=0, pp=1)
    assert list(layout.replicas(tp=1, pp=1)) == [9, 11, 13, 15]
    groups = rank_lists(layout)
    assert groups["tp"][0] == [0, 1]
    assert groups["dp"][0] == [0, 4]
    assert groups["pp"][0] == [0, 8]


def test_stages_of_layers() -> None:
    stages = StageLayout(3, (1, 3, 2))
    assert [stages.place_of(layer).stage for layer in range(6)] == [0, 1, 1, 1, 2, 2]
    assert [stages.place_of(layer).local for layer in range(6)] == [0, 0, 1, 2, 0, 1]
    with pytest.raises(IndexError, match="layer 6"):
        stages.place_of(6)


def test_chunks_of_an_interleaved_pipeline() -> None:
    """Chunk i of the model is on stage i % pp, as megatron-core places it."""
    stages = even_stages(8, 2, 2)
    assert [(p.stage, p.chunk, p.local) for p in map(stages.place_of, range(8))] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1),
        (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert list(stages.layers_of(1, 1)) == [6, 7]


def test_empty_slots_take_a_place_in_the_split() -> None:
    assert even_stages(6, 4, 1, (0, 7)).layers_per_chunk == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: even_stages(4, 3),
            r"--pipeline-model-parallel-size 3 does not divide .* 4 layers",
        ),
        (lambda: even_stages(6, 2, 1, (8, 0)), r"--noop-layers 8,0: must be .* below 8 = 6 layers"),
        (lambda: listed_stages(4, 2, (1, 2, 1)), r"--num-layer-list 1,2,1: 3 numbers; needed: "),
        (lambda: listed_stages(4, 2, (1, 2)), r"--num-layer-list 1,2 has 3 layers, the model 4"),
    ],
)
def test_impossible_stages_are_refused(build: Callable[[], StageLayout], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_expert_grid_is_megatrons() -> None:
    """Order tp-ep-dp-pp: expert tensor parallelism innermost, then expert parallelism."""
    layout = ParallelLayout.build(world=16, stages=even_stages(2, 2), tp=2, ep=2, etp=2)
    place = layout.expert_coords(11)
    assert (place.tp, place.ep, place.dp, place.pp) == (1, 1, 0, 1)
    assert list(layout.expert_replicas(1, 1, 1)) == [11, 15]
    assert rank_lists(layout)["ep"][0] == [0, 2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 8, "tp": 3}, r"world size 8 .*--tensor-model-parallel-size 3 .*= 3; start "),
        ({"world": 6, "tp": 2, "pp": 2}, r"not a multiple of .*= 4; start torchrun with a mult"),
        ({"world": 4, "ep": 3}, r"--expert-model-parallel-size 3 x .* = 3 does not divide the 4 "),
        ({"world": 2, "tp": 0}, r"--tensor-model-parallel-size 0: must be at least 1"),
        ({"world": 2, "cp": -1}, r"--context-parallel-size -1: must be at least 1"),
    ],
)
def test_impossible_grids_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout.build(
            world=sizes.pop("world"), stages=even_stages(4, sizes.pop("pp", 1)), **sizes
        )


@given(st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None)
def test_engines_are_runs_of_neighbours(tp: int, num_replicas: int) -> None:
    engine = EngineLayout(tp * num_replicas, tp)
    assert engine.num_replicas == num_replicas
    for rank in range(engine.world):
        assert engine.replica_of(rank) * tp + engine.tp_rank(rank) == rank
        assert rank in engine.replicas(engine.tp_rank(rank))
    assert sorted(r for i in range(tp) for r in engine.replicas(i)) == list(range(engine.world))


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_engines_that_do_not_fill_the_world_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"--rollout-tp {tp} .*8"):
        EngineLayout(8, tp)


@given(st.lists(st.builds(range, sizes, st.integers(5, 30), st.integers(1, 8)), min_size=1))
@example([range(0, 8, 4), range(1, 8, 4)])
@settings(deadline=None)
def test_merging_keeps_every_holder_once(several: list[range]) -> None:
    merged = merge_owner_ranks(several)
    held = sorted(rank for owner_ranks in several for rank in owner_ranks)
    assert sorted(rank for owner_ranks in merged for rank in owner_ranks) == held


@pytest.mark.parametrize(
    ("several", "merged"),
    [
        ([range(0, 8, 2), range(1, 8, 2)], [range(8)]),
        ([range(0, 12, 4), range(2, 12, 4)], [range(0, 11, 2)]),
        ([range(4, 5), range(5, 6), range(6, 7)], [range(4, 7)]),
        ([range(0, 8, 4)], [range(0, 8, 4)]),
        # interleaved, but with holes: ranks 0, 1, 4, 5 are no arithmetic progression
        ([range(0, 8, 4), range(1, 8, 4)], [range(0, 8, 4), range(1, 8, 4)]),
        ([range(0, 8, 4), range(8, 16, 4)], [range(0, 8, 4), range(8, 16, 4)]),
    ],
)
def test_ranges_that_interleave_become_one(several: list[range], merged: list[range]) -> None:
    assert [list(r) for r in merge_owner_ranks(several)] == [list(r) for r in merged]
