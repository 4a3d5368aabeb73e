"""Plans in which short rows are on few context-parallel ranks and long ones on many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import ParallelConfig, RLRunConfig, TrainConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import nested_sizes
from mindspeed_rl.packing.context_groups import SharedRow
from mindspeed_rl.packing.cost import SequenceCost
from mindspeed_rl.packing.micro_batches import (
    MicroBatchPlan,
    PackingRules,
    check_hybrid_context,
    drawn_lengths,
    token_limit,
)
from mindspeed_rl.planning.findings import find_out
from mindspeed_rl.planning.report import lines
from mindspeed_rl.planning.run_plan import run_packing

COST = SequenceCost(linear=3.0, quadratic=0.25, exchanged=0.5)


@st.composite
def steps(draw: st.DrawFn) -> tuple[PackingRules, list[int]]:
    """Rules of a hybrid plan, and lengths that fit all ranks together."""
    cp = draw(st.sampled_from([2, 3, 4, 6, 8]))
    tp = draw(st.sampled_from([1, 2]))
    room = draw(st.integers(1, 12))
    rules = PackingRules(
        dp=draw(st.sampled_from([1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([1, 3])),
        max_tokens=draw(st.sampled_from([cp * room, None])),
        row_multiple=2 * cp * tp,
        sequence_multiple=2 * cp,
        count_multiple=draw(st.sampled_from([1, 2])),
        fewest=draw(st.sampled_from([1, 4])),
        cost=COST,
        context_sizes=nested_sizes(cp),
        lockstep=draw(st.booleans()),
    )
    return rules, draw(st.lists(st.integers(1, cp * room), min_size=1, max_size=40))


def static(rules: PackingRules, lengths: list[int]) -> MicroBatchPlan:
    return replace(rules, context_sizes=(rules.context_sizes[-1],)).assign(lengths)


def padded(lengths: list[int], multiple: int) -> list[int]:
    return [-(-n // multiple) * multiple for n in lengths]


def by_rank(plan: MicroBatchPlan, rules: PackingRules) -> dict[tuple[int, int], list[int]]:
    """Numbers of the rows of each (dp, cp) rank."""
    return {
        (dp, cp): plan.rows_of(dp, cp)
        for dp in range(rules.dp)
        for cp in range(rules.context_sizes[-1])
    }


@given(steps())
@settings(deadline=None)
def test_every_plan_of_rows_on_some_ranks_is_whole(step: tuple[PackingRules, list[int]]) -> None:
    """Also those that are not taken: each sample once, rows fit, every rank has a row."""
    rules, lengths = step
    context, cp = rules.context_rules(lengths), rules.context_sizes[-1]
    seen = []
    for rows in context.plans(lengths):
        plan = rules._placed(rows, context, lengths)
        seen.append(plan)
        assert sorted(i for mine in plan.assignment for row in mine for i in row) == list(
            range(len(lengths))
        )
        assert {len(own) for own in by_rank(plan, rules).values()} == {plan.num_micro_batches}
        assert plan.num_micro_batches % rules.count_multiple == 0
        assert plan.places is not None
        for dp, places in enumerate(plan.places):
            for row, place in enumerate(places):
                assert place.size in rules.context_sizes and place.first % place.size == 0
                chunks = 2 * place.size if place.size > 1 else 1
                tokens = padded([lengths[i] for i in plan.assignment[dp][row]], chunks)
                length = plan.row_lengths[dp][row]
                assert sum(tokens) <= length and length % chunks == 0
                # With its padding a sample may be longer than all ranks have room for.
                room = max(place.size * context.tokens, *padded(lengths, 2 * cp))
                assert sum(tokens) <= (place.size * context.tokens if place.size < cp else room)
        for (dp, _), own in by_rank(plan, rules).items():
            assert [plan.places[dp][row].micro_batch for row in own] == list(range(len(own)))
    assert seen


@given(steps())
@settings(deadline=None)
def test_a_hybrid_plan_is_taken_only_where_it_is_better(
    step: tuple[PackingRules, list[int]],
) -> None:
    """No rank has more tokens at a time, and the last rank ends no later, padding included."""
    rules, lengths = step
    plan, plain = rules.assign(lengths), static(rules, lengths)
    context, cp = rules.context_rules(lengths), rules.context_sizes[-1]
    most = max(context.tokens, -(-max(padded(lengths, 2 * cp)) // cp))
    multiple = rules.row_multiple // cp
    assert plan.tokens_of_rank(cp) <= -(-most // multiple) * multiple
    assert work_of_busiest(plan, rules, lengths) <= work_of_busiest(plain, rules, lengths) + 1e-9


def work_of_busiest(plan: MicroBatchPlan, rules: PackingRules, lengths: list[int]) -> float:
    """By definition: each rank's clock, and who waits for whom."""
    cp = rules.context_sizes[-1]
    clock = dict.fromkeys(by_rank(plan, rules), 0.0)
    for micro in range(plan.num_micro_batches):
        for dp in range(rules.dp):
            for row in {plan.rows_of(dp, rank)[micro] for rank in range(cp)}:
                size = plan.shared_by(dp, row) or cp
                first = 0 if plan.places is None else plan.places[dp][row].first
                chunks = 2 * size if size > 1 else 1
                work = 0.0
                own = padded([lengths[i] for i in plan.assignment[dp][row]], chunks)
                for n in own:
                    work += (3 * n + 0.25 * n * n + 0.5 * n * (size - 1)) / size
                work += 3 * (plan.row_lengths[dp][row] - sum(own)) / size
                ranks = [(dp, first + at) for at in range(size)]
                begin = max(clock[rank] for rank in ranks)
                clock |= dict.fromkeys(ranks, begin + work)
        if rules.lockstep:
            clock = dict.fromkeys(clock, max(clock.values()))
    return max(clock.values())


def test_short_samples_are_on_one_rank_and_long_ones_on_many() -> None:
    """Room for 10 tokens a rank: 40 tokens need four ranks, 17 two, the others one."""
    rules = PackingRules(
        dp=1,
        micro_batch_size=1,
        max_tokens=40,
        row_multiple=8,
        sequence_multiple=8,
        cost=SequenceCost(exchanged=1.0),
        context_sizes=(1, 2, 4),
    )
    lengths = [17, 5, 40, 3, 10, 18, 4, 9, 10, 7, 9, 10]
    plan = rules.assign(lengths)
    assert plan.places is not None
    size = {
        i: place.size
        for row, place in zip(plan.assignment[0], plan.places[0], strict=True)
        for i in row
    }
    assert [size[i] for i in range(len(lengths))] == [2, 1, 4, 1, 1, 2, 1, 1, 1, 1, 1, 1]
    assert plan.num_tokens < static(rules, lengths).num_tokens
    assert plan.tokens_of_rank(4) == 10


def test_a_heavy_sample_is_shared_by_more_ranks_than_its_length_needs() -> None:
    """One of four ranks would have nearly all the work of the step."""
    rules = PackingRules(
        dp=1,
        micro_batch_size=1,
        max_tokens=400,
        row_multiple=8,
        sequence_multiple=8,
        cost=SequenceCost(1.0, 1.0),
        context_sizes=(1, 2, 4),
    )
    plan = rules.assign([96, 5, 6, 5, 7])
    assert plan.tokens_of_rank(4) < 40


@pytest.mark.parametrize("seed", range(3))
def test_work_is_spread_evenly_over_ranks(seed: int) -> None:
    """512 drawn samples on 2 x 8 ranks: the busiest rank has at most 1 % more than the mean."""
    rules = PackingRules(
        dp=2,
        micro_batch_size=1,
        max_tokens=32768,
        row_multiple=16,
        sequence_multiple=16,
        cost=SequenceCost(2e10, 1e5, 5e8),
        context_sizes=(1, 2, 4, 8),
    )
    lengths = drawn_lengths(512, 5000, 32768, seed)
    plan = rules.assign(lengths)
    assert plan.places is not None
    work = dict.fromkeys(by_rank(plan, rules), 0.0)
    for rank, rows in by_rank(plan, rules).items():
        for row in rows:
            size = plan.places[rank[0]][row].size
            work[rank] += sum(
                rules.cost.share(lengths[i], size) for i in plan.assignment[rank[0]][row]
            )
    assert max(work.values()) <= 1.01 * sum(work.values()) / len(work)


def test_finish_waits_for_the_ranks_of_a_row() -> None:
    """Work by tokens: rank 1 waits in the second micro-batch for rank 0, and ranks 2, 3 do not."""
    rules = PackingRules(
        dp=1, micro_batch_size=1, max_tokens=80, sequence_multiple=8, row_multiple=8,
        context_sizes=(1, 2, 4),
    )  # fmt: skip
    lengths = [10, 2, 3, 4, 8, 20]
    rows = [
        [
            tuple(SharedRow((i,), i, 1) for i in range(4)),
            (SharedRow((4,), 0, 2), SharedRow((5,), 2, 1), SharedRow((), 3, 1)),
        ]
    ]
    assert rules.context_rules(lengths).finish(rows, lengths) == 3 + 20
    lockstep = replace(rules, lockstep=True).context_rules(lengths)
    assert lockstep.finish(rows, lengths) == 10 + 20


def test_flags_that_exclude_each_other() -> None:
    parallel = ParallelConfig(context_parallel_size=4, hybrid_context_parallel=True)
    train = TrainConfig(train_iters=1)
    check_hybrid_context(train, parallel, gathers=False)
    for wrong, gathers in (
        (replace(train, equal_micro_batch_lengths=True), False),
        (train, True),
        (replace(train, max_tokens_per_micro_batch=0), False),
    ):
        with pytest.raises(UsageError, match="--hybrid-context-parallel"):
            check_hybrid_context(wrong, parallel, gathers=gathers)
    sized = replace(parallel, max_seqlen_per_dp_cp_rank=100)
    assert token_limit(train, sized) == 400
    check_hybrid_context(replace(train, max_tokens_per_micro_batch=400), sized, gathers=False)
    with pytest.raises(UsageError, match="--max-seqlen-per-dp-cp-rank"):
        check_hybrid_context(replace(train, max_tokens_per_micro_batch=300), sized, gathers=False)


def test_memory_and_a_dry_run_know_the_plan() -> None:
    """With enough samples a rank is as full as without the flag; all but groups is the same."""
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --context-parallel-size 4
        --max-prompt-length 500 --rollout-max-response-length 3500 --rl-dry-run-mean-length 1000
        --grpo-prompts-per-step 64 --grpo-group-size 8 --rollout-tp 4 --rollout-kv-cache-gb 1
        --tensor-model-parallel-size 2 --sequence-parallel
    """.split()
    hybrid, plain = (
        parse(RLRunConfig, [*words, *more], "test").config
        for more in (["--hybrid-context-parallel"], [])
    )
    found, before = find_out(hybrid, 16), find_out(plain, 16)
    assert found.prediction.workload == before.prediction.workload
    assert found.prediction.training.peak(0, found.prediction.workload) == (
        before.prediction.training.peak(0, before.prediction.workload)
    )
    rules = run_packing(hybrid, found.prediction.plan)
    for seed in range(3):
        plan = rules.assign(drawn_lengths(512, 1000, 4000, seed))
        assert plan.places is not None
        assert 4 * plan.tokens_of_rank(4) <= found.prediction.workload.tokens
    text = "\n".join(lines(found))
    assert "rows on 1, 2 or 4 context-parallel ranks" in text
    assert sum(found.packing.samples_by_ranks.values()) == 512
    assert set(found.packing.samples_by_ranks) == {1, 2, 4}
    assert "samples by the context-parallel ranks" in text
    assert f"up to {found.packing.tokens_of_rank} tokens on a context-parallel rank" in text
    assert found.packing.tokens_of_rank <= 1000 < found.packing.longest_row
    assert not before.packing.samples_by_ranks
    assert set(found.prediction.groups(0)) - set(before.prediction.groups(0)) == {
        "context_parallel_group_of_2"
    }


def test_memory_of_few_samples_is_that_of_a_rank_that_has_them_alone() -> None:
    """Two short samples go to a rank each where keys and values travel slower than ranks work."""
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --context-parallel-size 4
        --max-prompt-length 40 --rollout-max-response-length 60
        --grpo-prompts-per-step 1 --grpo-group-size 2 --rollout-tp 4 --rollout-kv-cache-gb 1
        --max-tokens-per-micro-batch 512
    """.split()
    plain, hybrid = (
        parse(RLRunConfig, [*words, *more], "test").config
        for more in ([], ["--hybrid-context-parallel"])
    )
    found, before = find_out(hybrid, 4).prediction, find_out(plain, 4).prediction
    slow_links = SequenceCost(linear=1.0, exchanged=4.0)
    whole, parts = (
        replace(run_packing(config, prediction.plan), cost=slow_links).assign([100, 90])
        for config, prediction in ((plain, before), (hybrid, found))
    )
    assert (whole.tokens_of_rank(4), parts.tokens_of_rank(4)) == (50, 100)
    assert (before.workload.tokens, before.workload.trained) == (2 * 104, 2 * 60)
    assert (found.workload.tokens, found.workload.trained) == (4 * 128, 4 * 2 * 60)


def test_the_longest_sequence_must_fit_all_ranks() -> None:
    words = f"""
        --hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --train-iters 1 --context-parallel-size 4
        --max-prompt-length 500 --rollout-max-response-length 3500 --hybrid-context-parallel
        --grpo-prompts-per-step 64 --grpo-group-size 8 --max-seqlen-per-dp-cp-rank 999
        --rollout-kv-cache-gb 1
    """.split()
    config = parse(RLRunConfig, words, "test").config
    with pytest.raises(UsageError, match=r"--max-seqlen-per-dp-cp-rank 999 .* 1000"):
        find_out(config, 8)
