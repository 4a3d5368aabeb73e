"""Reshard plans of all ranks against arrays that were sliced by hand.

The oracle in ``support/layout_oracle.py`` shares no code with the planner; messages travel through
``support/local_transport.py``, so the product's own executor moves real tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import (
    FIXED,
    GQA,
    LATENT,
    MOE,
    PIPELINED_ENGINE,
    PLAIN_LATENT,
    REDUNDANT,
    TIED,
    cases,
    layouts_of,
)
from support.layout_oracle import megatron_params, vllm_params
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.weights import exchange
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.layouts.base import ShardLayout
from mindspeed_rl.weights.layouts.hf_file import HfFileLayout
from mindspeed_rl.weights.planner import ReshardPlan, check_same_tensors, plan_reshard
from mindspeed_rl.weights.schedule import plan_schedule
from mindspeed_rl.weights.sync_metrics import SyncTraffic
from mindspeed_rl.weights.traffic import element_bytes_of, rank_floor, rank_traffic

UNTOUCHED = -7
ITEM_BYTES = 4


# --- layouts -----------------------------------------------------------------------------------


def plans_of(
    source: ShardLayout, target: ShardLayout, case: Case, relay: bool = False
) -> list[ReshardPlan]:
    return [
        plan_reshard(source, target, r, case.ranks_per_node, relay=relay) for r in range(case.world)
    ]


def smallest_bucket(case: Case, source: ShardLayout, target: ShardLayout, relay: bool) -> int:
    """A bucket that makes many rounds: at most twice the smallest that is accepted."""
    bucket_bytes = 64
    while True:
        try:
            plan_schedule(
                source,
                target,
                bucket_bytes=bucket_bytes // 2 - 16,
                item_bytes=ITEM_BYTES,
                ranks_per_node=case.ranks_per_node,
                relay=relay,
            )
        except ValueError:
            bucket_bytes *= 2
        else:
            return bucket_bytes


def tensors(params: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in params.items()}


def untouched(params: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {n: torch.full(shape, UNTOUCHED, dtype=torch.int32) for n, shape in params.items()}


def move(
    case: Case,
    source: ShardLayout,
    target: ShardLayout,
    bucket_bytes: int,
    relay: bool = False,
    many_messages: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Run the executor on all ranks; every rank's target parameters."""
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
        assert resharder.staging_bytes() <= bucket_bytes
        write = untouched(target.local_shapes(rank))
        traffic = resharder.run(tensors(megatron_params(case, hf, rank)), write)
        plan = resharder.plan
        assert traffic == SyncTraffic(
            *(
                ITEM_BYTES * sum(t.dst_box.num_elements for t in transfers)
                for transfers in (plan.receives, plan.sends, plan.copies)
            )
        )
        assert transport.sent_bytes == traffic.sent_bytes
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
    """Names and shapes of every rank; the HF tensors are the checkpoint's."""
    hf = hf_arrays(case)
    source, target = layouts_of(case)
    assert dict(source.hf_shapes) == {name: array.shape for name, array in hf.items()}
    assert dict(target.hf_shapes) == dict(source.hf_shapes)
    for rank in range(case.world):
        trainer, engine = megatron_params(case, hf, rank), vllm_params(case, hf, rank)
        assert source.local_shapes(rank) == {n: a.shape for n, a in trainer.items()}
        assert target.local_shapes(rank) == {n: a.shape for n, a in engine.items()}


@given(cases(), st.booleans(), st.booleans())
@settings(max_examples=16, deadline=None)
@example(GQA, True, False)
@example(GQA, True, True)
@example(TIED, True, False)
@example(MOE, True, False)
@example(MOE, True, True)
@example(LATENT, True, False)
@example(PLAIN_LATENT, True, True)
@example(PIPELINED_ENGINE, True, True)
@example(REDUNDANT, True, False)
@example(replace(LATENT, dp=16, ranks_per_node=8), False, False)  # 64 ranks
@example(replace(MOE, dp=16, ranks_per_node=8), False, True)
def test_every_element_arrives_where_vllm_keeps_it(case: Case, tight: bool, relay: bool) -> None:
    """All ranks' plans, run by the executor: bit-equal to slicing, padding untouched."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    bucket_bytes = smallest_bucket(case, source, target, relay) if tight else 10**9
    for rank, written in enumerate(move(case, source, target, bucket_bytes, relay)):
        for name, wanted in vllm_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(written[name].numpy(), expected, f"{rank} {name}")


@given(cases(), st.booleans(), st.integers(1, 64))
@settings(max_examples=10, deadline=None)
@example(GQA, False, 1)
@example(MOE, True, 24)
@example(LATENT, False, 8)
@example(PIPELINED_ENGINE, True, 1)
def test_every_element_arrives_without_staging(case: Case, relay: bool, alone: int) -> None:
    """Rectangles that are one run of memory on either side travel from or into it."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    bucket_bytes = smallest_bucket(case, source, target, relay)
    with mock.patch.object(exchange, "ALONE_BYTES", alone):
        moved = move(case, source, target, bucket_bytes, relay, many_messages=True)
    for rank, written in enumerate(moved):
        for name, wanted in vllm_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(written[name].numpy(), expected, f"{rank} {name}")


@pytest.mark.parametrize("case", FIXED)
def test_export_puts_whole_tensors_on_the_writer(case: Case) -> None:
    """The target of an HF export: every tensor complete, vocabulary padding left out."""
    source, _ = layouts_of(case)
    hf = hf_arrays(case)
    target = HfFileLayout(source.hf_shapes)
    bucket_bytes = smallest_bucket(case, source, target, relay=False)
    first, *others = move(case, source, target, bucket_bytes)
    assert list(first) == list(source.hf_shapes)
    for name, array in hf.items():
        np.testing.assert_array_equal(first[name].numpy(), array, name)
    assert not any(others)


@pytest.mark.parametrize("relay", [False, True])
def test_an_expert_that_a_rank_keeps_twice_arrives_once(relay: bool) -> None:
    """The second one is a copy within the engine, bit for bit."""
    case = replace(REDUNDANT, physical_experts=(1, 1, 0, 2, 3, 7, 6, 5, 4, 1, 0, 2), ep=2, etp=2)
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    bytes_of = element_bytes_of(source, ITEM_BYTES)
    num_duplicates = 0
    for plan in plans_of(source, target, case, relay):
        received = rank_traffic(plan, bytes_of, case.ranks_per_node).receive_bytes
        assert received == rank_floor(source, target, plan.rank, bytes_of)
        num_duplicates += len(plan.local_duplicates)
    num_engines, num_layers, num_matrices = case.world // 4, sum(case.moe_layers), 3
    assert num_duplicates == num_engines * num_layers * num_matrices
    bucket_bytes = smallest_bucket(case, source, target, relay)
    for rank, written in enumerate(move(case, source, target, bucket_bytes, relay)):
        for name, wanted in vllm_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(written[name].numpy(), expected, f"{rank} {name}")


@given(cases(), st.booleans())
@settings(max_examples=60, deadline=None)
@example(GQA, False)
@example(GQA, True)
@example(TIED, False)
@example(MOE, False)
@example(LATENT, True)
@example(PLAIN_LATENT, False)
@example(PIPELINED_ENGINE, False)
@example(REDUNDANT, True)
def test_plans_of_all_ranks_fit_together(case: Case, relay: bool) -> None:
    """Sends equal receives; sources own what they send; each element is written once."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    plans = plans_of(source, target, case, relay)
    assert len({plan.digest for plan in plans}) == 1
    for plan in plans:
        for transfer in plan.sends:
            assert transfer in plans[transfer.dst_rank].receives
        held = megatron_params(case, hf, plan.rank), vllm_params(case, hf, plan.rank)
        for transfer in (*plan.sends, *plan.copies):
            assert transfer.src_rank == plan.rank
            param = held[transfer.hop - 1][transfer.src_param]  # hop 2 passes on what arrived
            mine = transfer.src_view.of(param)[transfer.src_box.slices]
            np.testing.assert_array_equal(mine, hf[transfer.hf_name][transfer.hf_box.slices])
        times = {n: np.zeros(s, int) for n, s in target.local_shapes(plan.rank).items()}
        for transfer in (*plan.receives, *plan.copies, *plan.local_duplicates):
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
        replace(MOE, whole_shared=True),
    ]
    assert len({digest(case) for case in [GQA, *changes]}) == 1 + len(changes)


def test_layouts_of_different_models_are_refused() -> None:
    source, _ = layouts_of(GQA)
    _, target = layouts_of(replace(GQA, hidden=4))
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight: \(67, 3\) -> \(67, 4\)"):
        check_same_tensors(source, target)


@pytest.mark.slow
def test_the_plan_of_one_rank_of_4096_is_cheap() -> None:
    """O(own transfers): every rank plans alone, and its peers agree with it."""
    case = replace(
        GQA, num_layers=8, pp=8, tp=8, dp=64, kv_heads=8, ffn=64, engine_tp=8, ranks_per_node=16
    )
    source, target = layouts_of(case)
    plan = plan_reshard(source, target, 1234, case.ranks_per_node)
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


# --- the pieces of a checkpoint ----------------------------------------------------------------


@given(cases())
@settings(max_examples=40, deadline=None)
@example(TIED)
@example(MOE)
@example(LATENT)
def test_shards_that_are_no_mirrors_partition_every_tensor(case: Case) -> None:
    """The checksum counts each source element once because of this."""
    for layout in layouts_of(case):
        for name, shape in layout.hf_shapes.items():
            times = np.zeros(shape, int)
            for shard in layout.shards(name):
                if not shard.is_replica:
                    times[shard.piece.hf_box.slices] += 1
            assert np.all(times == 1), name
