"""Groups of ranks by arithmetic against their definition, rank by rank."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl.core.groups import context_group_name
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.planning.communicators import GroupsOfRank, RunGroups

sizes = st.sampled_from([1, 2, 3])


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def runs(draw: st.DrawFn) -> RunGroups:
    tp, dp, pp = (draw(sizes) for _ in range(3))
    cp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    per_stage = tp * cp * dp
    etp = draw(divisors(per_stage))
    ep = draw(divisors(per_stage // etp))
    parallel = ParallelLayout.build(
        world=per_stage * pp, stages=even_stages(pp, pp), tp=tp, cp=cp, ep=ep, etp=etp,
        hybrid_context=draw(st.booleans()),
    )  # fmt: skip
    engine_tp = draw(divisors(parallel.world))
    engine_dp = draw(divisors(parallel.world // engine_tp))
    engine = EngineLayout(parallel.world, engine_tp, engine_dp, expert_parallel=draw(st.booleans()))
    facts = [draw(st.booleans()) for _ in range(5)]
    return RunGroups(parallel, draw(st.sampled_from([engine, None])), *facts)


def by_definition(rank: int, run: RunGroups) -> GroupsOfRank:
    """Peers are those who stand where this rank stands on the named axes: all ranks are asked."""
    parallel = run.parallel
    everyone = range(parallel.world)

    def dense(*axes: str) -> tuple[int, ...]:
        at = parallel.coords(rank)
        return tuple(
            r
            for r in everyone
            if all(getattr(parallel.coords(r), axis) == getattr(at, axis) for axis in axes)
        )

    def expert(*axes: str) -> tuple[int, ...]:
        at = parallel.expert_coords(rank)
        return tuple(
            r
            for r in everyone
            if all(getattr(parallel.expert_coords(r), axis) == getattr(at, axis) for axis in axes)
        )

    pipeline = dense("tp", "cp", "dp")
    ends = (pipeline[0], pipeline[-1])
    groups = {
        "world": tuple(everyone), "tp": dense("cp", "dp", "pp"), "cp": dense("tp", "dp", "pp"),
        "dp_cp": dense("tp", "pp"), "pp": pipeline,
    }  # fmt: skip
    if parallel.hybrid_context:
        nested = {4: [2], 6: [3], 8: [2, 4]}.get(parallel.cp, [])
        for size in nested:
            block = parallel.coords(rank).cp // size
            groups[f"context_parallel_group_of_{size}"] = tuple(
                r for r in dense("tp", "dp", "pp") if parallel.coords(r).cp // size == block
            )
    if run.sharded_optimizer:
        groups["intra_dist_opt_instance"] = tuple(everyone)
    else:
        groups["mp"] = dense("cp", "dp")
    if run.tied and rank in ends:
        groups["embd"] = ends
    if run.experts:
        groups |= {"ep": expert("tp", "dp", "pp"), "ep_tp": expert("ep", "dp", "pp")}
        groups["tp_ep_mp"] = expert("dp", "pp")
        if run.router_bias:
            groups["tp_dp_cp"] = dense("pp")
        if parallel.ep > 1:
            groups["ep_dp"] = expert("tp", "ep", "pp")
            if not run.sharded_optimizer:
                groups["tp_ep_pp"] = expert("dp")
    if run.engine is not None:
        groups |= engine_by_definition(rank, run.engine, run.engine_mc2)
    return {name: ranks for name, ranks in groups.items() if len(set(ranks)) > 1}


def engine_by_definition(rank: int, engine: EngineLayout, mc2: bool) -> GroupsOfRank:
    peers = tuple(r for r in range(engine.world) if engine.replica_of(r) == engine.replica_of(rank))
    groups = {
        "rollout tp": tuple(r for r in peers if engine.group_of(r) == engine.group_of(rank)),
        "rollout dp": tuple(r for r in peers if engine.tp_rank(r) == engine.tp_rank(rank)),
    }
    if engine.expert_parallel:
        groups["rollout ep"] = peers
        if mc2:
            groups["rollout mc2"] = peers
    return groups


@given(runs())
@settings(deadline=None)
def test_groups_of_a_rank_are_those_of_the_definition(run: RunGroups) -> None:
    for rank in range(run.parallel.world):
        assert run.of_rank(rank) == by_definition(rank, run)


@given(runs())
@settings(deadline=None)
def test_all_groups_are_those_of_every_rank_each_once(run: RunGroups) -> None:
    expected: dict[str, dict[tuple[int, ...], None]] = {}
    for rank in range(run.parallel.world):
        for name, ranks in run.of_rank(rank).items():
            expected.setdefault(name, {})[ranks] = None
    found = run.of_all_ranks()
    assert found == {name: tuple(groups) for name, groups in expected.items()}
    for groups in found.values():
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), "a rank is in one group of a name"


@given(runs())
@settings(deadline=None)
def test_the_groups_that_are_created_are_those_that_are_counted(run: RunGroups) -> None:
    parallel, counted = run.parallel, run.of_all_ranks()
    for size in parallel.context_sizes[1:-1]:
        assert set(parallel.context_blocks(size)) == set(counted[context_group_name(size)])
