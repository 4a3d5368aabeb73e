"""No rank receives more than it lacks, and nobody sends much more than must be sent.

What ranks hold and need is told by ``support/layout_oracle.py``, which shares no code with the
product: each element of its arrays has a number of its own, so floors are sizes of sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from reshard_figures import (
    busiest_bytes,
    critical_bytes,
    node_floors,
    rank_floor,
    round_traffic,
)
from scipy.optimize import linprog
from support.checked_runs import configured
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import (
    GQA,
    LATENT,
    MOE,
    MOVED,
    PLAIN_LATENT,
    REDUNDANT,
    TIED,
    cases,
    layouts_of,
)
from support.layout_oracle import megatron_params, vllm_params
from support.published import Reshard
from support.tiers import slow_but

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.boxes import Box
from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weights.executor import round_bytes
from mindspeed_rl.weights.planner import Overlaps, plan_reshard
from mindspeed_rl.weights.schedule import plan_schedule
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic

ITEM_BYTES, BF16 = 4, 2


# --- what must arrive --------------------------------------------------------------------------


def elements(params: Mapping[str, Array]) -> set[int]:
    """The numbers of the elements that some parameters hold."""
    found: set[int] = set()
    for array in params.values():
        found.update(array.ravel().tolist())
    return found - {PADDING}


def nodes_of(case: Case) -> list[range]:
    """The ranks of every node."""
    size = case.ranks_per_node
    return [range(first, min(first + size, case.world)) for first in range(0, case.world, size)]


@given(cases())
@settings(max_examples=30, deadline=None)
@example(GQA)
@example(TIED)
@example(MOE)
@example(LATENT)
@example(PLAIN_LATENT)
@example(REDUNDANT)
@example(MOVED)
@example(replace(LATENT, dp=2, ranks_per_node=3))
@example(replace(GQA, tp=1, pp=2, dp=4, kv_heads=2, engine_tp=4, ranks_per_node=4))
def test_ranks_receive_exactly_what_they_lack(case: Case) -> None:
    """And, where ranks pass on what they receive, nodes as well."""
    source, target = layouts_of(case)
    hf = hf_arrays(case)
    bytes_of = element_bytes_of(source, ITEM_BYTES)
    held = [elements(megatron_params(case, hf, rank)) for rank in range(case.world)]
    needed = [elements(vllm_params(case, hf, rank)) for rank in range(case.world)]
    for rank in range(case.world):
        floor = ITEM_BYTES * len(needed[rank] - held[rank])
        plan = plan_reshard(source, target, rank, case.ranks_per_node)
        traffic = rank_traffic(plan, bytes_of, case.ranks_per_node)
        assert traffic.receive_bytes == floor, rank
        assert traffic.copy_bytes == ITEM_BYTES * len(needed[rank] & held[rank]), rank
        assert rank_floor(source, target, rank, bytes_of) == floor, rank
    floors = {
        number: ITEM_BYTES * len(set().union(*(needed[r] - held_by_node for r in node)))
        for number, node in enumerate(nodes_of(case))
        for held_by_node in [set().union(*(held[r] for r in node))]
    }
    assert node_floors(source, target, bytes_of, case.ranks_per_node) == floors
    for number, node in enumerate(nodes_of(case)):
        plans = (plan_reshard(source, target, r, case.ranks_per_node, relay=True) for r in node)
        by_rank = (rank_traffic(plan, bytes_of, case.ranks_per_node) for plan in plans)
        assert sum(t.inter_node_receive_bytes for t in by_rank) == floors[number], node


# --- who sends ---------------------------------------------------------------------------------

_TIE = {"tie_word_embeddings": True}
QWEN_7B = Reshard("qwen2.5-7b", 16, "tp=4,pp=2", "tp=2")
SMALL = (
    QWEN_7B,
    replace(QWEN_7B, train="tp=4,pp=2,num_layer_list=3-2", changes=_TIE),
    Reshard("qwen2.5-7b", 32, "tp=2,pp=2,cp=2,num_layer_list=2-1-1-2", "tp=4"),
    # more rollout ranks than key/value heads
    Reshard("qwen3-8b", 32, "tp=8,pp=4,num_layer_list=2-1-1-3", "tp=16", 8),
    # experts that a rank keeps twice, in an engine that is the whole world
    Reshard(
        "qwen3-30b-a3b", 4, "pp=2,ep=2,etp=1,num_layer_list=1-1", "dp=4,ep=4", 4,
        {"num_experts": 4, "num_experts_per_tok": 2}, (0, 0, 1, 0, 2, 2, 3, 3),
    ),
    Reshard("qwen3-30b-a3b", 16, "tp=4,pp=2,ep=8,etp=1,num_layer_list=2-1", "tp=2,dp=8,ep=16"),
    # experts cut by ETP, four engines; nodes smaller than a stage
    Reshard("qwen3-30b-a3b", 64, "tp=4,pp=2,ep=8,num_layer_list=1-1", "tp=2,dp=8,ep=16", 8),
    # fewer expert-parallel ranks in the engine than in training; experts sliced in the engine
    Reshard("qwen3-30b-a3b", 32, "tp=2,pp=2,ep=16,etp=1,num_layer_list=1-1", "tp=2,dp=2,ep=4"),
    Reshard("qwen3-30b-a3b", 16, "tp=2,pp=2,ep=4,etp=2,num_layer_list=1-1", "tp=4,dp=2"),
    Reshard(
        "deepseek-v3", 32, "tp=2,pp=4,ep=4,moe_tp_extend_ep=1,num_layer_list=1-1-2-1",
        "tp=2,dp=8,ep=16", 8,
    ),
)  # fmt: skip
# real depth, few owner ranks of large matrices
DEEP = (
    Reshard("qwen3-8b", 16, "pp=4", "tp=16"),
    Reshard("qwen3-30b-a3b", 16, "tp=2,ep=2,etp=1", "tp=4,ep=4", changes={"num_experts": 16}),
)
# The cases of the docs, whole, and tied embeddings.
WHOLE = (
    QWEN_7B,
    Reshard("qwen3-30b-a3b", 16, "tp=4,pp=2,ep=8,etp=1", "tp=2,dp=8,ep=16"),
    Reshard(
        "qwen3-235b-a22b", 128, "tp=4,pp=4,cp=4,ep=32,etp=1,num_layer_list=23-24-24-23",
        "tp=4,dp=32,ep=128",
    ),
    Reshard(
        "deepseek-v3", 256, "tp=4,pp=8,ep=8,moe_tp_extend_ep=1,num_layer_list=7-8-8-8-8-8-7-7",
        "tp=2,dp=128,ep=256",
    ),
    # the engine's tensor parallelism cuts the experts
    Reshard("qwen3-30b-a3b", 16, "tp=1,pp=2,ep=8,etp=1", "tp=2"),
    Reshard(
        "qwen3-235b-a22b", 128,
        "tp=4,pp=8,ep=16,etp=1,num_layer_list=12-12-12-12-12-12-11-11", "tp=8",
    ),
    Reshard(
        "deepseek-v3", 256,
        "tp=1,pp=16,ep=16,etp=1,num_layer_list=3-4-4-4-4-4-4-4-4-4-4-4-4-4-4-2", "tp=32",
    ),
    replace(QWEN_7B, changes=_TIE),
    Reshard("qwen3-8b", 8, "pp=4", "tp=1", 8, _TIE),
)  # fmt: skip


def best_largest_send(source: ShardLayout, target: ShardLayout, world: int) -> float:
    """The smallest possible largest number of bytes that a rank sends: a linear programme.

    Each set of owners must send what the ranks outside it need of their shard, split among them
    as they like, elements included; that is the optimum of the maximum flow.
    """
    bytes_of = element_bytes_of(source, BF16)
    demand: Counter[tuple[int, ...]] = Counter()
    for name in source.hf_shapes:
        owners_of: dict[Box, set[int]] = {}
        for src in source.shards(name):
            owners_of.setdefault(src.piece.hf_box, set()).update(src.owner_ranks)
        needed_by: dict[Box, set[int]] = {}
        for dst in target.shards(name):
            needed_by.setdefault(dst.piece.hf_box, set()).update(dst.owner_ranks)
        for box, owners in owners_of.items():
            for wanted, ranks in needed_by.items():
                if common := box.intersect(wanted):
                    size = common.num_elements * bytes_of(name)
                    demand[tuple(sorted(owners))] += size * len(ranks - owners)
    flows = [(group, rank) for group, owners in enumerate(demand) for rank in owners]
    columns = len(flows) + 1  # the last is the largest load
    supply = np.zeros((len(demand), columns))
    load = np.zeros((world, columns))
    for column, (group, rank) in enumerate(flows):
        supply[group, column] = load[rank, column] = 1
    load[:, -1] = -1
    gigabytes = [size / 1e9 for size in demand.values()]
    cost = np.zeros(columns)
    cost[-1] = 1
    solved = linprog(cost, A_ub=load, b_ub=np.zeros(world), A_eq=supply, b_eq=gigabytes)
    assert solved.success, solved.message
    return float(solved.fun) * 1e9


@pytest.mark.parametrize("case", slow_but((*SMALL, *DEEP), (*SMALL, DEEP[0])), ids=str)
def test_the_send_load_is_near_the_optimum(case: Reshard) -> None:
    source, target = case.layouts()
    bytes_of = element_bytes_of(source, BF16)
    plans = (plan_reshard(source, target, r, case.ranks_per_node) for r in range(case.world))
    largest = max(rank_traffic(p, bytes_of, case.ranks_per_node).send_bytes for p in plans)
    assert largest <= 1.25 * best_largest_send(source, target, case.world)


@pytest.mark.parametrize("case", slow_but(WHOLE, (QWEN_7B, WHOLE[4], WHOLE[-1])), ids=str)
def test_the_critical_path_is_near_the_busiest_rank(case: Reshard) -> None:
    """Rounds keep everybody busy with few messages. Of large worlds some ranks of all stages."""
    source, target = case.layouts()
    bytes_of = element_bytes_of(source, BF16)
    overlaps = Overlaps(source, target, case.ranks_per_node)
    schedule = plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes(512 << 20),
        item_bytes=BF16,
        ranks_per_node=case.ranks_per_node,
        overlaps=overlaps,
    )
    ranks = range(0, case.world, 1 if case.world <= 16 else 11)
    plans = [
        plan_reshard(source, target, rank, case.ranks_per_node, overlaps=overlaps) for rank in ranks
    ]
    totals = [rank_traffic(plan, bytes_of, case.ranks_per_node) for plan in plans]
    for rank, total in zip(ranks, totals, strict=True):
        assert total.receive_bytes == rank_floor(source, target, rank, bytes_of) > 0
    by_round = [round_traffic(plan, schedule, source, bytes_of) for plan in plans]
    assert critical_bytes(by_round) <= 1.1 * max(map(busiest_bytes, totals))
    assert max(r.num_messages + r.num_alone for r in by_round) <= 2000
    assert max(r.peak_bytes for r in by_round) <= round_bytes(512 << 20)


def keeps_the_relay(case: Reshard) -> bool:
    """Several nodes, and an engine that is dense or spreads its experts, as a run decides."""
    _, target = case.layouts()
    everywhere = target.has_experts_everywhere
    config: RLRunConfig = configured(RLRunConfig, "")
    return config.rollout.relays(case.world, case.ranks_per_node, experts_everywhere=everywhere)


RELAYED = (SMALL[2], SMALL[3], SMALL[6], WHOLE[2])


def test_engines_that_cut_all_experts_have_no_relay() -> None:
    """Which would take turns from them, and with these their few messages."""
    assert all(map(keeps_the_relay, RELAYED))
    assert not any(map(keeps_the_relay, WHOLE[5:7]))


def test_a_relay_fits_the_usual_bucket_where_its_hops_load_other_ranks() -> None:
    """The second hop of an embedding, the first of experts: both are in rounds of their own."""
    case = SMALL[-1]
    source, target = case.layouts()
    bucket = round_bytes(512 << 20)
    schedule = plan_schedule(
        source, target, bucket_bytes=bucket, item_bytes=BF16, ranks_per_node=8, relay=True
    )
    bytes_of = element_bytes_of(source, BF16)
    overlaps = Overlaps(source, target, 8, relay=True)
    for rank in (0, 9, 31):
        plan = plan_reshard(source, target, rank, 8, relay=True, overlaps=overlaps)
        assert 0 < round_traffic(plan, schedule, source, bytes_of).peak_bytes <= bucket


@pytest.mark.parametrize("case", slow_but(RELAYED, RELAYED[:3]), ids=str)
def test_a_relay_brings_nodes_what_they_lack_once(case: Reshard) -> None:
    """Within the staging memory, in about the messages that docs/resharding.md tells."""
    source, target = case.layouts()
    bytes_of, per_node = element_bytes_of(source, BF16), case.ranks_per_node
    overlaps = Overlaps(source, target, per_node, relay=True)
    schedule = plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes(512 << 20),
        item_bytes=BF16,
        ranks_per_node=per_node,
        relay=True,
        overlaps=overlaps,
    )
    floors, arrived = node_floors(source, target, bytes_of, per_node), 0
    node = max(floors)
    for rank in range(node * per_node, (node + 1) * per_node):
        plan = plan_reshard(source, target, rank, per_node, relay=True, overlaps=overlaps)
        arrived += rank_traffic(plan, bytes_of, per_node).inter_node_receive_bytes
        by_round = round_traffic(plan, schedule, source, bytes_of)
        assert by_round.peak_bytes <= round_bytes(512 << 20)
        assert by_round.num_messages <= 1200
    assert arrived == floors[node] > 0
