"""Shares and rules of a run: equal on all ranks, from flags, layouts and the sample table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.rl_run import TableRun, make_run

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.generation.assignment import EngineAssignment, rebalance_rules
from mindspeed_rl.metrics.metric_set import Max, Total
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.samples.rollout_info import RolloutInfo

PARTIAL = "--partial-rollout-tokens 3 --old-logprob recompute --rl-inference-logprobs-is-correction"


def spread(run: TableRun, world: int, rank: int) -> tuple[EngineAssignment, RLPlan]:
    """How one rank of ``world`` engines deals, and its plan."""
    engine = EngineLayout(world, 1)
    plan = replace(
        run.parts.plan, engine=engine, rollout_layout=VllmLayout(run.parts.plan.spec, engine)
    )
    rules = rebalance_rules(run.config, plan, max_num_seqs=16, item_bytes=4)
    own = run.parts.rollouts.assignment
    return replace(own, engine=engine, rank=rank, rules=rules), plan


def test_every_sample_has_one_engine_and_open_ones_keep_theirs(tmp_path: Path) -> None:
    """The new ones are dealt by length; prompt 3 is known to be long."""
    run = make_run(tmp_path)
    run.state.lengths.observe({3: [8, 8, 8], 4: [1, 1, 1], 5: [1, 1, 1]})
    prompts = [run.parts.data.train[i] for i in (4, 3, 3, 5, 4, 3, 3)]
    prefixes: list[RolloutInfo | None] = [None] * 7
    prefixes[0] = RolloutInfo(0, 4, 2, 2, False, 0, 1, math.nan)
    shares = [
        spread(run, 2, rank)[0].own_samples(prompts, run.state.lengths, prefixes) for rank in (0, 1)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(7))
    assert 0 in shares[1], "its tokens are there"
    hard = [sum(i in (1, 2, 5, 6) for i in share) for share in shares]
    assert hard == [2, 2]
    for flags, history in (("--rollout-balance even", run.state.lengths), ("", None)):
        plain = make_run(tmp_path, flags)
        found = [spread(plain, 2, r)[0].own_samples(prompts, history) for r in (0, 1)]
        assert found == [[0, 1, 2], [3, 4, 5, 6]], "in order"


def test_the_longest_expected_start_first_and_siblings_together(tmp_path: Path) -> None:
    """Prompt 3 is known to be long, prompt 5 short; a prefix leaves less to generate."""
    run = make_run(tmp_path)
    for _ in range(2):  # of prompts that are known, lengths have a spread of their own
        run.state.lengths.observe({3: [8, 8, 8], 4: [4, 4, 4], 5: [1, 1, 1]})
    prompts = [run.parts.data.train[i] for i in (5, 4, 3, 4, 3)]
    own, settings = run.parts.rollouts.assignment, run.parts.rollouts.settings(1.0)
    expected = own.expected_lengths(prompts, settings, run.state.lengths)
    assert own.start_order(range(5), expected) == [2, 4, 1, 3, 0]
    capped = own.expected_lengths(prompts, settings, run.state.lengths, limits=[8, 8, 2, 8, 8])
    assert own.start_order(range(5), capped) == [4, 1, 3, 2, 0]
    nothing = own.expected_lengths(prompts, settings, None)
    assert own.start_order(range(5), nothing) == [0, 1, 2, 3, 4], "in order"
    partial = replace(own, partial_tokens=8)
    prefixes: list[RolloutInfo | None] = [None] * 5
    prefixes[2] = RolloutInfo(2, 3, 7, 7, False, 0, 0, math.nan)
    grown = partial.expected_lengths(prompts, settings, run.state.lengths, prefixes)
    assert partial.start_order(range(5), grown, prefixes) == [4, 1, 3, 0, 2], "one token is left"
    assert replace(own, by_length=False).start_order(range(5), expected) == [0, 1, 2, 3, 4]


def test_rules_are_those_of_every_rank(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, "--rollout-rebalance waiting --rollout-rebalance-interval 7 "
        "--rollout-kv-cache-gb 0.125",
    )  # fmt: skip
    first, second = (spread(run, 2, rank)[0].rules for rank in (0, 1))
    assert first is not None and first == second
    layout = spread(run, 2, 0)[1].rollout_layout
    weights = 4 * sum(math.prod(shape) for shape in dict(layout.local_shapes(0)).values())
    token_bytes = 4 * 2 * 4  # one layer, keys and values of 4 channels, fp32
    assert first.cost.context_tokens == weights / token_bytes
    assert first.room == int(0.125 * 2**30 / token_bytes)
    assert (first.interval, first.running, first.capacity) == (7, False, 16)
    assert first.cost.sizes == () and first.cost.ridge_tokens == 256


def test_one_engine_has_nobody_to_give_to(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--rollout-rebalance all")
    settings, own = run.parts.rollouts.settings(1.0), run.parts.rollouts.assignment
    expected = own.expected_lengths(run.parts.data.train[:2], settings, None)
    assert own.rebalancer(expected) is None
    found = spread(run, 2, 1)[0].rebalancer(expected)
    assert found is not None and found.steps == 128


@pytest.mark.parametrize("platform", ["cpu", "cuda", "npu"])
def test_requests_move_on_every_platform(platform: str, tmp_path: Path) -> None:
    """The noise of a token follows from seed and position in all of their engines."""
    engine_provider().check_run(make_run(tmp_path, "--rollout-rebalance all").config, platform)


def test_metrics_of_a_rebalanced_rollout(tmp_path: Path) -> None:
    stats = StepStats(
        steps=9, moved=2, moved_tokens=70, rebalance_seconds=0.5, preemptions=3, cache_use=0.75
    )
    plain = make_run(tmp_path).parts.rollouts.assignment.metrics(stats)
    assert plain == {"rollout/steps_max": Max(9.0), "rollout/preemptions": Total(3.0)}
    found = spread(make_run(tmp_path, "--rollout-rebalance all"), 2, 0)[0].metrics(stats)
    assert found["rollout/moved_samples"] == Total(2.0)
    assert found["rollout/moved_tokens"] == Total(70.0)
    assert found["throughput/settle_s"] == Max(0.5)
    stats = StepStats(resumed=3, kept_cached_tokens=81)
    found = make_run(tmp_path, PARTIAL).parts.rollouts.assignment.metrics(stats)
    assert found["rollout/resumed_samples"] == Total(3.0)
    assert found["rollout/kept_cached_tokens"] == Total(81.0)
