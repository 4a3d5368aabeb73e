"""Reshard plans of all ranks against arrays that were sliced by hand (R5, R6).

The oracle in ``support/layout_oracle.py`` shares no code with the planner; messages travel through
``support/local_transport.py``, so the product's own executor moves real tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_cases import FIXED, GQA, LATENT, MOE, PLAIN_LATENT, TIED, cases, layouts_of
from support.layout_oracle import PADDING, Array, Case, hf_arrays, megatron_params, vllm_params
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.resharding.executor import Resharder
from mindspeed_rl.resharding.layouts.base import ShardLayout
from mindspeed_rl.resharding.layouts.hf_file import HfFileLayout
from mindspeed_rl.resharding.planner import (
    ReshardPlan,
    choose_source,
    destinations_of,
    plan_reshard,
)
from mindspeed_rl.resharding.schedule import plan_rounds

UNTOUCHED = -7
ITEM_BYTES = 4


# --- who sends to whom -------------------------------------------------------------------------


@st.composite
def progressions(draw: st.DrawFn) -> range:
    """Ranks as an arithmetic progression."""
    start, step, count = (draw(st.integers(*b)) for b in ((0, 30), (1, 9), (1, 24)))
    return range(start, start + step * count, step)


@given(progressions(), progressions(), st.integers(1, 40))
@settings(max_examples=1000, deadline=None)
@example(range(2), range(32), 8)  # most destinations have no source on their node
@example(range(0, 32, 4), range(32), 8)
@example(range(3), range(7), 100)  # everything on one node, sizes that do not divide
def test_the_sender_inverse_is_the_inverse(
    sources: range, destinations: range, ranks_per_node: int
) -> None:
    chosen = {d: choose_source(sources, destinations, d, ranks_per_node) for d in destinations}
    assert set(chosen.values()) <= set(sources)
    for src in sources:
        served = list(destinations_of(sources, destinations, src, ranks_per_node))
        assert served == [d for d, s in chosen.items() if s == src], src


@given(progressions(), progressions(), st.integers(1, 40))
@settings(deadline=None)
def test_the_choice_prefers_itself_then_its_node(
    sources: range, destinations: range, ranks_per_node: int
) -> None:
    for dst in destinations:
        src = choose_source(sources, destinations, dst, ranks_per_node)
        if dst in sources:
            assert src == dst
        elif any(s // ranks_per_node == dst // ranks_per_node for s in sources):
            assert src // ranks_per_node == dst // ranks_per_node


def test_far_destinations_are_spread_evenly() -> None:
    """floor(i S / D) when no node helps: loads differ by at most one."""
    sources, destinations = range(3), range(64, 64 + 20)
    load = Counter(choose_source(sources, destinations, d, 8) for d in destinations)
    assert sorted(load.values()) == [6, 7, 7]


# --- layouts -----------------------------------------------------------------------------------


def plans_of(source: ShardLayout, target: ShardLayout, case: Case) -> list[ReshardPlan]:
    return [plan_reshard(source, target, r, case.ranks_per_node) for r in range(case.world)]


def tensors(params: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in params.items()}


def untouched(params: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {n: torch.full(shape, UNTOUCHED, dtype=torch.int32) for n, shape in params.items()}


def move(
    case: Case, source: ShardLayout, target: ShardLayout, bucket_bytes: int
) -> list[dict[str, torch.Tensor]]:
    """Run the executor on all ranks; every rank's target parameters."""
    hf = hf_arrays(case)

    def one_rank(rank: int, transport: LocalTransport) -> dict[str, torch.Tensor]:
        resharder = Resharder(
            source,
            target,
            rank=rank,
            ranks_per_node=case.ranks_per_node,
            transport=transport,
            dtype=torch.int32,
            bucket_bytes=bucket_bytes,
        )
        write = untouched(target.local_shapes(rank))
        resharder.run(tensors(megatron_params(case, hf, rank)), write)
        sent = sum(t.dst_box.num_elements for t in resharder.plan.sends)
        assert transport.sent_bytes == sent * ITEM_BYTES
        return write

    return LocalWorld(case.world).run(one_rank)


@given(cases())
@settings(max_examples=60, deadline=None)
@example(GQA)
@example(TIED)
@example(MOE)
@example(LATENT)
@example(PLAIN_LATENT)
def test_layouts_declare_what_megatron_and_vllm_hold(case: Case) -> None:
    """Names and shapes of every rank; the HF tensors are the checkpoint's (R6)."""
    hf = hf_arrays(case)
    source, target = layouts_of(case)
    assert dict(source.hf_shapes) == {name: array.shape for name, array in hf.items()}
    assert dict(target.hf_shapes) == dict(source.hf_shapes)
    for rank in range(case.world):
        trainer, engine = megatron_params(case, hf, rank), vllm_params(case, hf, rank)
        assert source.local_shapes(rank) == {n: a.shape for n, a in trainer.items()}
        assert target.local_shapes(rank) == {n: a.shape for n, a in engine.items()}


@given(cases(), st.sampled_from([1, 400, 10**9]))
@settings(max_examples=40, deadline=None)
@example(GQA, 400)
@example(TIED, 400)
@example(MOE, 400)
@example(LATENT, 400)
@example(PLAIN_LATENT, 400)
def test_every_element_arrives_where_vllm_keeps_it(case: Case, bucket_bytes: int) -> None:
    """All ranks' plans, run by the executor: bit-equal to slicing, padding untouched (R6)."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    for rank, written in enumerate(move(case, source, target, bucket_bytes)):
        for name, wanted in vllm_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(written[name].numpy(), expected, f"{rank} {name}")


@pytest.mark.parametrize("case", FIXED)
def test_export_puts_whole_tensors_on_the_writer(case: Case) -> None:
    """The target of an HF export: every tensor complete, vocabulary padding left out."""
    source, _ = layouts_of(case)
    hf = hf_arrays(case)
    first, *others = move(case, source, HfFileLayout(source.hf_shapes), bucket_bytes=1000)
    assert list(first) == list(source.hf_shapes)
    for name, array in hf.items():
        np.testing.assert_array_equal(first[name].numpy(), array, name)
    assert not any(others)


@given(cases())
@settings(max_examples=60, deadline=None)
@example(GQA)
@example(TIED)
@example(MOE)
@example(LATENT)
@example(PLAIN_LATENT)
def test_plans_of_all_ranks_fit_together(case: Case) -> None:
    """Sends equal receives; sources own what they send; each element is written once."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    plans = plans_of(source, target, case)
    assert len({plan.digest for plan in plans}) == 1
    for plan in plans:
        for transfer in plan.sends:
            assert transfer in plans[transfer.dst_rank].receives
        held = megatron_params(case, hf, plan.rank)
        for transfer in (*plan.sends, *plan.copies):
            assert transfer.src_rank == plan.rank
            mine = transfer.src_view.of(held[transfer.src_param])[transfer.src_box.slices]
            np.testing.assert_array_equal(mine, hf[transfer.hf_name][transfer.hf_box.slices])
        times = {n: np.zeros(s, int) for n, s in target.local_shapes(plan.rank).items()}
        for transfer in (*plan.receives, *plan.copies):
            assert transfer.dst_rank == plan.rank
            transfer.dst_view.of(times[transfer.dst_param])[transfer.dst_box.slices] += 1
        for name, wanted in vllm_params(case, hf, plan.rank).items():
            np.testing.assert_array_equal(times[name], wanted != PADDING, name)
    assert sum(len(p.sends) for p in plans) == sum(len(p.receives) for p in plans)


def test_both_ends_list_a_message_in_the_same_order() -> None:
    source, target = layouts_of(GQA)
    plans = plans_of(source, target, GQA)
    pairs = 0
    for plan in plans:
        for peer in {t.dst_rank for t in plan.sends}:
            sent = [t for t in plan.sends if t.dst_rank == peer]
            assert sent == [t for t in plans[peer].receives if t.src_rank == plan.rank]
            pairs += 1
    assert pairs > 4


def test_the_digest_follows_everything_a_plan_depends_on() -> None:
    def digest(case: Case) -> str:
        return plan_reshard(*layouts_of(case), 0, case.ranks_per_node).digest

    changes = [
        replace(GQA, vocab=68),
        replace(GQA, engine_tp=2),
        replace(GQA, pp=1, dp=4),
        replace(GQA, tied=True),
        replace(GQA, ranks_per_node=8),
        replace(GQA, num_layers=6),
        replace(GQA, qk_norm=True),
        replace(GQA, layer_list=(3, 1)),
        replace(GQA, num_layers=3, noop=(0,)),
        replace(GQA, num_layers=3, noop=(3,)),
        MOE,
        replace(MOE, ep=1),
        replace(MOE, etp=1),
        replace(MOE, engine_ep=True),
        replace(MOE, engine_dp=1),
        replace(MOE, expert_multiple=1),
        replace(MOE, transposed=True),
    ]
    assert len({digest(case) for case in [GQA, *changes]}) == 1 + len(changes)


def test_layouts_of_different_models_are_refused() -> None:
    source, _ = layouts_of(GQA)
    _, target = layouts_of(replace(GQA, hidden=4))
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight: \(67, 3\) -> \(67, 4\)"):
        plan_reshard(source, target, 0, 8)


def test_the_plan_of_one_rank_of_4096_is_cheap() -> None:
    """O(own transfers): every rank plans alone, and its peers agree with it."""
    case = replace(
        GQA, num_layers=8, pp=8, tp=8, dp=64, kv_heads=8, ffn=64, engine_tp=8, ranks_per_node=16
    )
    source, target = layouts_of(case)
    start = time.perf_counter()
    plan = plan_reshard(source, target, 1234, case.ranks_per_node)
    assert time.perf_counter() - start < 5.0
    received = sum(t.dst_box.num_elements for t in (*plan.receives, *plan.copies))
    real = vllm_params(case, hf_arrays(case), 1234).values()
    assert received == sum(int((array != PADDING).sum()) for array in real)
    for peer in {t.src_rank for t in plan.receives} | {t.dst_rank for t in plan.sends}:
        other = plan_reshard(source, target, peer, case.ranks_per_node)
        assert [t for t in other.sends if t.dst_rank == 1234] == [
            t for t in plan.receives if t.src_rank == peer
        ]
        assert [t for t in other.receives if t.src_rank == 1234] == [
            t for t in plan.sends if t.dst_rank == peer
        ]


# --- rounds ------------------------------------------------------------------------------------


def staging_bytes(plan: ReshardPlan, names: set[str]) -> int:
    """What a rank sends plus receives for some tensors."""
    moved = [t for t in (*plan.sends, *plan.receives) if t.hf_name in names]
    return ITEM_BYTES * sum(t.dst_box.num_elements for t in moved)


@given(cases(), st.integers(1, 3000))
@settings(max_examples=80, deadline=None)
@example(GQA, 700)
@example(replace(GQA, tp=1, pp=1, dp=8, kv_heads=4, engine_tp=8, heads_per_group=2), 500)
def test_rounds_stay_within_the_bucket(case: Case, bucket_bytes: int) -> None:
    """Every tensor in one round; no rank stages more than the bucket, unless for one tensor."""
    source, target = layouts_of(case)
    rounds = plan_rounds(source, target, bucket_bytes, ITEM_BYTES, case.ranks_per_node)
    assert Counter(n for names in rounds for n in names) == Counter(list(source.hf_shapes))
    plans = plans_of(source, target, case)
    for names in rounds:
        assert names, "an empty round costs a collective"
        if len(names) > 1:
            assert max(staging_bytes(p, set(names)) for p in plans) <= bucket_bytes


def test_a_large_bucket_makes_one_round() -> None:
    source, target = layouts_of(GQA)
    assert len(plan_rounds(source, target, 10**9, ITEM_BYTES, 8)) == 1


def test_rounds_take_all_stages_in_turn() -> None:
    """While every stage has tensors left, neighbours in a round come from different stages."""
    case = replace(GQA, num_layers=4, pp=4, tp=1, dp=2, tied=False, engine_tp=2)
    source, target = layouts_of(case)
    order = [n for names in plan_rounds(source, target, 1500, ITEM_BYTES, 8) for n in names]
    stages = [source.shards(name)[0].holders.start // 2 for name in order]
    fewest = min(Counter(stages).values())
    for start in range(0, 4 * fewest, 4):
        assert sorted(stages[start : start + 4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_without_room_is_refused(bucket_bytes: int) -> None:
    source, target = layouts_of(GQA)
    with pytest.raises(ValueError, match=r"--reshard-bucket-mb .* must be positive"):
        plan_rounds(source, target, bucket_bytes, ITEM_BYTES, 8)


# --- the pieces of a checkpoint ----------------------------------------------------------------


@given(cases())
@settings(max_examples=40, deadline=None)
@example(TIED)
@example(MOE)
@example(LATENT)
def test_shards_that_are_no_mirrors_partition_every_tensor(case: Case) -> None:
    """The checksum counts each source element once because of this (R5)."""
    for layout in layouts_of(case):
        for name, shape in layout.hf_shapes.items():
            times = np.zeros(shape, int)
            for shard in layout.shards(name):
                if not shard.mirror:
                    times[shard.piece.hf_box.slices] += 1
            assert np.all(times == 1), name
