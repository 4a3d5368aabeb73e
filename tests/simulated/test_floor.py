"""No rank receives more than it lacks, and nobody sends much more than must be sent.

The floors come from ``support/floor_oracle.py``, which shares no code with the product.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from support import floor_oracle as oracle
from support.floor_cases import (
    FloorCase,
    elements_held,
    elements_moved,
    floor_cases,
    layouts_of,
)
from support.floor_oracle import Rollout, Training
from support.tiers import slow_but

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.models.attention_rules import HeadSplit, StackedQKV
from mindspeed_rl.models.rules import WeightRow
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.executor import round_bytes
from mindspeed_rl.weights.layouts.base import ShardLayout
from mindspeed_rl.weights.layouts.megatron import MegatronLayout
from mindspeed_rl.weights.layouts.vllm import VllmLayout
from mindspeed_rl.weights.planner import overlaps, plan_reshard
from mindspeed_rl.weights.schedule import plan_schedule
from mindspeed_rl.weights.traffic import (
    critical_bytes,
    element_bytes_of,
    missing_elements,
    node_floors,
    rank_floor,
    rank_traffic,
    round_traffic,
)

BF16 = 2
# The four cases of the docs, whole.
QWEN_7B = FloorCase("qwen2.5-7b", Training(16, tp=4, pp=2), Rollout(16, tp=2))
QWEN_30B = FloorCase(
    "qwen3-30b-a3b", Training(16, tp=4, pp=2, ep=8, etp=1), Rollout(16, tp=2, dp=8, ep=16)
)
QWEN_235B = FloorCase(
    "qwen3-235b-a22b",
    Training(128, tp=4, pp=4, cp=4, ep=32, etp=1, layers=(23, 24, 24, 23)),
    Rollout(128, tp=4, dp=32, ep=128),
)
DEEPSEEK = FloorCase(
    "deepseek-v3",
    Training(256, tp=4, pp=8, ep=8, extend_ep=True, layers=(7, 8, 8, 8, 8, 8, 7, 7)),
    Rollout(256, tp=2, dp=128, ep=256),
)
PUBLISHED = (QWEN_7B, QWEN_30B, QWEN_235B, DEEPSEEK)

# Their shapes on at most 64 ranks and few layers, and what they leave out.
SMALL = (
    QWEN_7B,
    # experts that a rank keeps twice, in an engine that is the whole world
    FloorCase(
        "qwen3-30b-a3b",
        Training(4, pp=2, ep=2, etp=1),
        Rollout(4, dp=4, ep=4, slots=(0, 0, 1, 0, 2, 2, 3, 3)),
        4,
        {"num_experts": 4, "num_experts_per_tok": 2},
    ).with_layers(1, 1),
    replace(QWEN_7B, changes={"tie_word_embeddings": True}).with_layers(3, 2),
    FloorCase("qwen2.5-7b", Training(32, tp=2, pp=2, vpp=2, cp=2), Rollout(32, tp=4)).with_layers(
        2, 1, 1, 2
    ),
    # more rollout ranks than key/value heads
    FloorCase("qwen3-8b", Training(32, tp=8, pp=4), Rollout(32, tp=16), 8).with_layers(2, 1, 1, 3),
    QWEN_30B.with_layers(2, 1),
    # experts cut by ETP, four engines; nodes smaller than a stage
    FloorCase(
        "qwen3-30b-a3b", Training(64, tp=4, pp=2, ep=8), Rollout(64, tp=2, dp=8, ep=16), 8
    ).with_layers(1, 1),
    # fewer expert-parallel ranks in the engine than in training; experts sliced in the engine
    FloorCase(
        "qwen3-30b-a3b", Training(32, tp=2, pp=2, ep=16, etp=1), Rollout(32, tp=2, dp=2, ep=4)
    ).with_layers(1, 1),
    FloorCase(
        "qwen3-30b-a3b", Training(16, tp=2, pp=2, ep=4, etp=2), Rollout(16, tp=4, dp=2)
    ).with_layers(1, 1),
    # redundant experts; engines with two uneven stages
    FloorCase(
        "qwen3-30b-a3b",
        Training(16, tp=2, pp=2, ep=8, etp=1),
        Rollout(16, tp=2, dp=4, ep=8, slots=(*range(128), *range(0, 128, 8))),
    ).with_layers(1, 1),
    FloorCase(
        "qwen2.5-7b",
        Training(16, tp=4, pp=2),
        Rollout(16, tp=2, pp=2),
        changes={"tie_word_embeddings": True},
    ).with_layers(2, 3),
    FloorCase(
        "deepseek-v3",
        Training(32, tp=2, pp=4, ep=4, extend_ep=True),
        Rollout(32, tp=2, pp=2, dp=8, ep=16),
        8,
    ).with_layers(1, 1, 2, 1, first_k_dense_replace=3),
    FloorCase(
        "qwen3-235b-a22b",
        Training(64, tp=4, pp=4, cp=4, ep=16, etp=1),
        Rollout(64, tp=4, dp=16, ep=64),
    ).with_layers(1, 1, 1, 1),
    FloorCase(
        "deepseek-v3",
        Training(64, tp=4, pp=2, ep=8, extend_ep=True),
        Rollout(64, tp=2, dp=32, ep=64),
    ).with_layers(3, 2, first_k_dense_replace=3),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_floors_of_published_models_equal_the_oracle(case: FloorCase) -> None:
    """Every node of the four cases; of worlds above 64 every fifth rank: all positions in turn."""
    source, target = layouts_of(case)
    bytes_of = element_bytes_of(source, BF16)
    num_nodes = case.world // case.ranks_per_node
    problem = (case.config, case.training, case.rollout)
    for rank in range(0, case.world, 1 if case.world <= 64 else 5):
        floor = rank_floor(source, target, rank, bytes_of)
        assert floor == oracle.receive_floor(*problem, rank), rank
    nodes = node_floors(source, target, bytes_of, case.ranks_per_node)
    assert nodes == {
        node: oracle.node_floor(*problem, node, case.ranks_per_node) for node in range(num_nodes)
    }


@pytest.mark.parametrize("case", slow_but(PUBLISHED, (QWEN_7B,)), ids=str)
def test_received_bytes_of_published_models_equal_the_floor(case: FloorCase) -> None:
    """Whole models; all ranks of worlds up to 16, of the others some of every stage."""
    source, target = layouts_of(case)
    bytes_of = element_bytes_of(source, BF16)
    for rank in range(0, case.world, 1 if case.world <= 16 else 25):
        plan = plan_reshard(source, target, rank, case.ranks_per_node)
        traffic = rank_traffic(plan, bytes_of, case.ranks_per_node)
        floor = oracle.receive_floor(case.config, case.training, case.rollout, rank)
        assert traffic.receive_bytes == floor > 0, rank


def check_rank(case: FloorCase, source: ShardLayout, target: ShardLayout, rank: int) -> None:
    """Element sets, not only their sizes: held, needed and moved."""
    bytes_of = element_bytes_of(source, BF16)
    held = oracle.held(case.config, case.training, rank)
    needed = oracle.needed(case.config, case.rollout, rank)
    assert not oracle.differing(held, elements_held(source, rank)), rank
    assert not oracle.differing(needed, elements_held(target, rank)), rank
    plan = plan_reshard(source, target, rank, case.ranks_per_node)
    received, copied = elements_moved(plan.receives), elements_moved(plan.copies)
    assert not oracle.differing(needed, oracle.union((received, copied))), rank
    assert oracle.bytes_missing(copied, held) == 0, rank
    floor = oracle.bytes_missing(needed, held)
    assert oracle.bytes_missing(received, held) == floor, rank
    assert rank_traffic(plan, bytes_of, case.ranks_per_node).receive_bytes == floor, rank


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_rank_receives_exactly_what_it_lacks(case: FloorCase) -> None:
    source, target = layouts_of(case)
    for rank in range(case.world):
        check_rank(case, source, target, rank)


@given(floor_cases(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_ranks_of_any_layouts_receive_exactly_what_they_lack(
    case: FloorCase, random: Random
) -> None:
    source, target = layouts_of(case)
    for rank in random.sample(range(case.world), min(case.world, 4)):
        check_rank(case, source, target, rank)


# --- planted faults ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _WrongTraining(MegatronLayout):
    """Output projections of attention cut by rows."""

    @property
    def rows(self) -> tuple[WeightRow, ...]:
        rows = super().rows
        return tuple(replace(r, dim=0) if isinstance(r, HeadSplit) else r for r in rows)


@dataclass(frozen=True, slots=True)
class _RoundRobinKV(StackedQKV):
    """Ranks take key/value heads in turn instead of in runs."""

    def _kv(self, spec: ModelSpec, index: int, count: int) -> tuple[int, int]:
        return index % spec.num_kv_heads, 1


@dataclass(frozen=True)
class _WrongRollout(VllmLayout):
    """Replicated key/value heads on the wrong ranks."""

    @property
    def rows(self) -> tuple[WeightRow, ...]:
        rows = super().rows
        return tuple(
            _RoundRobinKV(r.param, hf=r.hf, bias=r.bias) if isinstance(r, StackedQKV) else r
            for r in rows
        )


KV_REPLICAS = FloorCase("qwen3-8b", Training(32, tp=8, pp=2), Rollout(32, tp=16)).with_layers(1, 1)


@pytest.mark.parametrize("wrong", ["training", "rollout"])
def test_a_planted_wrong_row_makes_the_floor_differ(wrong: str) -> None:
    source, target = layouts_of(KV_REPLICAS)
    planted: tuple[ShardLayout, ShardLayout] = (source, target)
    if wrong == "training":
        planted = (_WrongTraining(source.spec, source.parallel), target)
    else:
        planted = (source, _WrongRollout(target.spec, target.engine))
    bytes_of = element_bytes_of(source, BF16)
    problem = (KV_REPLICAS.config, KV_REPLICAS.training, KV_REPLICAS.rollout)
    ranks = range(KV_REPLICAS.world)
    floors = [oracle.receive_floor(*problem, rank) for rank in ranks]
    assert [rank_floor(source, target, rank, bytes_of) for rank in ranks] == floors
    assert [rank_floor(*planted, rank, bytes_of) for rank in ranks] != floors


# --- who sends ---------------------------------------------------------------------------------


def best_largest_send(
    source: ShardLayout, target: ShardLayout, world: int, ranks_per_node: int = 0
) -> float:
    """The smallest possible largest number of bytes that a rank sends: a linear programme.

    Each set of owners must send what the ranks outside it need of their shard, split among them
    as they like, elements included; that is the optimum of the maximum flow. With
    ``ranks_per_node`` a rank with owner ranks on its node receives from these alone.
    """
    bytes_of = element_bytes_of(source, BF16)
    demand: Counter[tuple[int, ...]] = Counter()
    for name in source.hf_shapes:
        holders_of: dict[Box, set[int]] = {}
        for src in source.shards(name):
            holders_of.setdefault(src.piece.hf_box, set()).update(src.owner_ranks)
        needed_by: dict[Box, set[int]] = {}
        for dst in target.shards(name):
            needed_by.setdefault(dst.piece.hf_box, set()).update(dst.owner_ranks)
        for box, owner_ranks in holders_of.items():
            for wanted, ranks in needed_by.items():
                common = box.intersect(wanted)
                for rank in ranks - owner_ranks if common else ():
                    node = rank // (ranks_per_node or 1)
                    near = [
                        r for r in owner_ranks if ranks_per_node and r // ranks_per_node == node
                    ]
                    group = tuple(sorted(near or owner_ranks))
                    demand[group] += common.num_elements * bytes_of(name)
    flows = [(group, rank) for group, owner_ranks in enumerate(demand) for rank in owner_ranks]
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


def largest_send(source: ShardLayout, target: ShardLayout, case: FloorCase) -> float:
    """The largest number of bytes that a rank sends."""
    bytes_of, sent = element_bytes_of(source, BF16), np.zeros(case.world)
    for name in source.hf_shapes:
        for _, _, box, chosen in overlaps(source, target, name, case.ranks_per_node, False):
            senders = chosen.source[chosen.hop > 0]
            np.add.at(sent, senders, box.num_elements * bytes_of(name))
    return float(sent.max())


# real depth, few owner ranks of large matrices
_DEEP = (
    FloorCase("qwen3-8b", Training(16, pp=4), Rollout(16, tp=16)),
    FloorCase("qwen3-8b", Training(16, tp=4, pp=4), Rollout(16, tp=16)),
    FloorCase(
        "qwen3-30b-a3b",
        Training(16, tp=2, ep=2, etp=1),
        Rollout(16, tp=4, pp=2, ep=4),
        changes={"num_experts": 16},
    ),
    FloorCase(
        "deepseek-v3",
        Training(16, tp=4, pp=2, ep=2, etp=1),
        Rollout(16, tp=16),
        changes={"n_routed_experts": 16},
    ).with_layers(4, 4),
)


@pytest.mark.parametrize("case", slow_but((*SMALL, *_DEEP), (*SMALL, _DEEP[0])), ids=str)
def test_the_send_load_is_near_the_optimum(case: FloorCase) -> None:
    source, target = layouts_of(case)
    bytes_of = element_bytes_of(source, BF16)
    largest = largest_send(source, target, case)
    plans = (plan_reshard(source, target, r, case.ranks_per_node) for r in range(case.world))
    assert largest == max(rank_traffic(p, bytes_of, 1).send_bytes for p in plans)
    assert largest <= 1.25 * best_largest_send(source, target, case.world)


@pytest.mark.slow
def test_the_send_load_of_any_layouts_is_near_the_optimum() -> None:
    """Against the best that takes from its own node first, all within 1.5; of models without
    tied embeddings nine of ten within 1.25.

    One and two layers per chunk, the same layouts in every run. What the rest is due to, and the
    optimum free of that rule, are in docs/resharding.md.
    """
    ratios: list[tuple[float, bool, str]] = []

    @given(floor_cases())
    @settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
    def look_at(case: FloorCase) -> None:
        source, target = layouts_of(case)
        if largest := largest_send(source, target, case):
            best = best_largest_send(source, target, case.world, case.ranks_per_node)
            tied = source.spec.tie_embeddings
            ratios.append((largest / best, tied, f"{case} nodes of {case.ranks_per_node}"))

    look_at()
    assert len(ratios) > 25
    assert max(ratios)[0] <= 1.5, max(ratios)
    untied = [(ratio, case) for ratio, tied, case in ratios if not tied]
    above = [found for found in untied if found[0] > 1.25]
    assert len(above) <= len(untied) // 10, above


_TIE = {"tie_word_embeddings": True}
TIED = (
    replace(QWEN_7B, changes=_TIE),
    FloorCase("qwen3-8b", Training(8, tp=2, pp=2), Rollout(8, tp=2), 8, _TIE),
    FloorCase("qwen3-8b", Training(8, tp=1, pp=4), Rollout(8, tp=1), 8, _TIE),
)


@pytest.mark.parametrize("case", slow_but((*PUBLISHED, *TIED), (QWEN_7B, TIED[-1])), ids=str)
def test_the_critical_path_is_near_the_busiest_rank(case: FloorCase) -> None:
    """Rounds keep everybody busy. Of large worlds ranks of all stages and positions."""
    source, target = layouts_of(case)
    bytes_of = element_bytes_of(source, BF16)
    schedule = plan_schedule(
        source,
        target,
        bucket_bytes=round_bytes(512 << 20),
        item_bytes=BF16,
        ranks_per_node=case.ranks_per_node,
    )
    ranks = range(0, case.world, 1 if case.world <= 16 else 11)
    plans = [plan_reshard(source, target, rank, case.ranks_per_node) for rank in ranks]
    totals = [rank_traffic(plan, bytes_of, case.ranks_per_node) for plan in plans]
    by_round = [round_traffic(plan, schedule, source, bytes_of) for plan in plans]
    assert critical_bytes(by_round) <= 1.1 * max(t.busiest_bytes for t in totals)


# --- sets of rectangles ------------------------------------------------------------------------


def test_overlapping_rectangles_count_once() -> None:
    """Hand-counted: a 4 x 4 square, twice, and its neighbour, less a middle and a column."""
    square, neighbour = Box((0, 0), (4, 4)), Box((0, 2), (4, 4))
    middle, column = Box((1, 1), (2, 2)), Box((0, 2), (9, 1))
    assert missing_elements((square, square, neighbour), ()) == 24
    assert missing_elements((square,), (middle, column)) == 16 - 4 - 2
    assert missing_elements((square,), (Box((4, 0), (4, 4)),)) == 16
    assert missing_elements((square,), (square,)) == 0
