"""Shares and rules of a run: equal on all ranks, from flags, layouts and the sample table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.rl_run import make_run

from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.observability.metrics import Max, Total
from mindspeed_rl.orchestration import rl_balance
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.parallel.layout import EngineLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout
from mindspeed_rl.rollout.step_loop import StepStats


def spread(run: RLJob, world: int, rank: int) -> RLJob:
    """The same run as one rank of ``world`` engines."""
    engine = EngineLayout(world, 1)
    plan = replace(run.plan, engine=engine, vllm=VllmLayout(run.plan.spec, engine))
    job = replace(run.job, plan=plan, world=replace(run.job.world, rank=rank, size=world))
    cast(Any, run.engine).max_num_seqs = 16
    return replace(run, job=job)


def test_every_sample_has_one_engine_and_open_ones_keep_theirs(tmp_path: Path) -> None:
    """The new ones are dealt by length; prompt 3 is known to be long."""
    run = make_run(tmp_path)
    run.lengths.observe({3: [8, 8, 8], 4: [1, 1, 1], 5: [1, 1, 1]})
    prompts = [run.prompts[i] for i in (4, 3, 3, 5, 4, 3, 3)]
    begun: list[Sample | None] = [None] * 7
    begun[0] = Sample(0, 4, 2, 2, False, 0, 1, math.nan)
    shares = [
        rl_balance.my_share(spread(run, 2, rank), prompts, run.lengths, begun) for rank in (0, 1)
    ]
    assert sorted(shares[0] + shares[1]) == list(range(7))
    assert 0 in shares[1], "its tokens are there"
    hard = [sum(i in (1, 2, 5, 6) for i in share) for share in shares]
    assert hard == [2, 2]
    for flags, history in (("--rollout-balance even", run.lengths), ("", None)):
        plain = make_run(tmp_path, flags)
        found = [rl_balance.my_share(spread(plain, 2, r), prompts, history) for r in (0, 1)]
        assert found == [[0, 1, 2], [3, 4, 5, 6]], "in order"


def test_rules_are_those_of_every_rank(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, "--rollout-rebalance waiting --rollout-rebalance-interval 7 "
        "--rollout-kv-cache-gb 0.125",
    )  # fmt: skip
    first, second = (rl_balance.rules_of(spread(run, 2, rank)) for rank in (0, 1))
    assert first == second
    layout = spread(run, 2, 0).plan.vllm
    weights = 4 * sum(math.prod(shape) for shape in dict(layout.local_shapes(0)).values())
    token_bytes = 4 * 2 * 4  # one layer, keys and values of 4 channels, fp32
    assert first.cost.context_tokens == weights / token_bytes
    assert first.room == int(0.125 * 2**30 / token_bytes)
    assert (first.interval, first.running, first.capacity) == (7, False, 16)
    assert first.cost.sizes == () and first.cost.ridge_tokens == 256


def test_one_engine_has_nobody_to_give_to(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--rollout-rebalance all")
    settings = run.sampling(1.0)
    assert rl_balance.make_rebalancer(run, run.prompts[:2], settings, None) is None
    found = rl_balance.make_rebalancer(spread(run, 2, 1), run.prompts[:2], settings, None)
    assert found is not None and found.steps == 128


def test_engines_that_cannot_continue_a_stream_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, "--rollout-rebalance all")
    with pytest.raises(ValueError, match=r"all: vLLM on cuda .* use waiting"):
        rl_balance.check_rebalance(run.config, "cuda")
    waiting = make_run(tmp_path, "--rollout-rebalance waiting")
    rl_balance.check_rebalance(waiting.config, "cuda")
    rl_balance.check_rebalance(run.config, "npu")


def test_metrics_of_a_rebalanced_rollout(tmp_path: Path) -> None:
    stats = StepStats(steps=9, moved=2, moved_tokens=70, settle_seconds=0.5)
    plain = rl_balance.balance_metrics(make_run(tmp_path), stats)
    assert plain == {"rollout/steps_max": Max(9.0)}
    found = rl_balance.balance_metrics(make_run(tmp_path, "--rollout-rebalance all"), stats)
    assert found["rollout/moved_samples"] == Total(2.0)
    assert found["rollout/moved_tokens"] == Total(70.0)
    assert found["throughput/settle_s"] == Max(0.5)
