"""Who is on the device in which phase, by offload mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.published import PUBLISHED

from mindspeed_rl.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.validate import RLPlan
from mindspeed_rl.dryrun.budget import least_offload
from mindspeed_rl.dryrun.step_time import old_logprob_share
from mindspeed_rl.dryrun.suggestions import plan_of
from mindspeed_rl.memory.owners import MemoryPhase, OffloadMode, Owner
from mindspeed_rl.memory.prediction import (
    MemoryAssumptions,
    MemoryPrediction,
    predict,
)

WORLD, RANK = 32, 17
FLAGS = f"""
    --hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --train-iters 1 --bf16
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --use-distributed-optimizer
    --grpo-prompts-per-step 32 --grpo-group-size 8 --grpo-kl-beta 0.001
    --max-prompt-length 512 --rollout-max-response-length 1536
    --rollout-tp 2 --rollout-dp 8 --rollout-ep 16 --rollout-kv-cache-gb 48
"""
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1")  # fmt: skip


def prediction_of(assumptions: MemoryAssumptions, *flags: str) -> MemoryPrediction:
    """With full recomputation, or other ``flags`` instead."""
    config = parse(RLRunConfig, [*FLAGS.split(), *(flags or RECOMPUTE)], "test").config
    return predict(config, plan_of(config, WORLD), assumptions)


def test_phases_hold_what_the_offload_mode_says() -> None:
    tables = {
        mode: prediction_of(MemoryAssumptions(offload=mode)).rank_table(RANK)
        for mode in (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL)
    }
    trainer = {Owner.PARAMETERS, Owner.GRAD_BUFFERS, Owner.OPTIMIZER, Owner.REFERENCE}
    rollout = {mode: trainer & set(t[MemoryPhase.ROLLOUT]) for mode, t in tables.items()}
    assert rollout[OffloadMode.NONE] == trainer
    assert rollout[OffloadMode.OPTIMIZER] == {Owner.PARAMETERS, Owner.REFERENCE}
    assert rollout[OffloadMode.ALL] == set()
    for mode, table in tables.items():
        assert Owner.PARAMETERS in table[MemoryPhase.SYNC], "weights are about to be read"
        assert Owner.KV_CACHE not in table[MemoryPhase.SYNC], "the cache comes last"
        keeps = Owner.ENGINE_WEIGHTS in table[MemoryPhase.TRAIN_IDLE]
        assert keeps == (mode is not OffloadMode.ALL)
    # with everything away, the reference comes in for its own pass only
    all_away = tables[OffloadMode.ALL]
    assert Owner.REFERENCE not in all_away[MemoryPhase.TRAIN_IDLE]


def test_borders_are_what_the_ledger_reads() -> None:
    prediction = prediction_of(MemoryAssumptions(offload=OffloadMode.OPTIMIZER))
    borders = {s: prediction.border(RANK, s) for s in ("train", "idle", "sync", "rollout")}
    assert set(borders["train"]) == {
        *("parameters", "grad_buffers", "optimizer", "reference", "engine_weights")
    }
    assert (
        set(borders["idle"])
        == set(borders["sync"])
        == {*("parameters", "reference", "engine_weights")}
    )
    assert set(borders["rollout"]) == {*borders["sync"], "kv_cache"}
    away = prediction_of(MemoryAssumptions(offload=OffloadMode.ALL))
    assert set(away.border(RANK, "idle")) == {"parameters"}
    assert set(away.border(RANK, "rollout")) == {"engine_weights", "kv_cache"}


def test_auto_takes_the_least_offload_that_fits() -> None:
    prediction = prediction_of(MemoryAssumptions())
    ranks = prediction.representatives()
    needed = {
        mode: prediction_of(MemoryAssumptions(offload=mode)).peak(ranks).num_bytes
        for mode in (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL)
    }
    assert needed[OffloadMode.NONE] > needed[OffloadMode.OPTIMIZER] > needed[OffloadMode.ALL]
    for mode, num_bytes in needed.items():
        assert least_offload(prediction, ranks, num_bytes) is mode
    assert least_offload(prediction, ranks, needed[OffloadMode.ALL] - 1) is None


def test_the_reference_pass_is_the_peak_where_it_brings_more_than_training_works_with() -> None:
    """With everything away in rollouts the reference is on the device for its own pass only."""
    away = MemoryAssumptions(offload=OffloadMode.ALL)

    def train(*flags: str) -> dict[Owner, int]:
        return prediction_of(away, *flags).rank_table(RANK)[MemoryPhase.TRAIN]

    short, long = train(), train("--recompute-granularity", "selective")
    assert short[Owner.REFERENCE] > 0 and Owner.LOGITS not in short
    assert Owner.REFERENCE not in long and long[Owner.ACTIVATIONS] > short[Owner.REFERENCE]
    without = train(*RECOMPUTE, "--grpo-kl-beta", "0")
    assert sum(without.values()) < sum(short.values())


def test_swapped_optimizer_state_passes_through_in_parts() -> None:
    plain = prediction_of(MemoryAssumptions()).rank_table(RANK)[MemoryPhase.TRAIN_IDLE]
    swapped = prediction_of(MemoryAssumptions(swap_parts=16)).rank_table(RANK)
    part = swapped[MemoryPhase.TRAIN_IDLE][Owner.OPTIMIZER]
    assert part == -(-plain[Owner.OPTIMIZER] // 16)


@pytest.mark.slow
def test_ranks_of_a_stage_differ_by_padding_alone() -> None:
    prediction = prediction_of(MemoryAssumptions())
    first, last = prediction.representatives()
    assert (first, last) == (0, 16)
    for rank in range(16, 32):
        for phase, table in prediction.rank_table(rank).items():
            expected = sum(prediction.rank_table(last)[phase].values())
            assert sum(table.values()) == pytest.approx(expected, rel=1e-3), (rank, phase)


def test_staging_that_is_known_is_taken() -> None:
    assumptions = replace(MemoryAssumptions(), staging_bytes={RANK: 12345})
    sync = prediction_of(assumptions).rank_table(RANK)[MemoryPhase.SYNC]
    assert sync[Owner.RESHARD_STAGING] == 12345
    other = prediction_of(assumptions).rank_table(RANK + 1)[MemoryPhase.SYNC]
    assert other[Owner.RESHARD_STAGING] == 512 << 20


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("", 0.0),
        ("--old-logprob recompute", 1.0),
        ("--old-logprob rollout --global-batch-size 64", 0.0),
        ("--global-batch-size 64", 0.75),
        ("--global-batch-size 64 --grpo-iterations 2", 1.0),
        ("--rl-kl-in-reward", 1.0),
        ("--rl-policy-loss clip_cov", 1.0),
    ],
)
def test_old_logprobs_cost_what_the_step_computes(flags: str, share: float) -> None:
    """256 samples of a step: the first batch of on-policy samples needs no pass."""
    prediction = prediction_of(MemoryAssumptions(), *RECOMPUTE, *flags.split())
    config, plan = prediction.config, prediction.plan
    assert isinstance(config, RLRunConfig) and isinstance(plan, RLPlan)
    assert old_logprob_share(config, plan) == share


def test_micro_batches_of_all_updates_wait_together() -> None:
    whole = prediction_of(MemoryAssumptions())
    quarters = prediction_of(MemoryAssumptions(), *RECOMPUTE, "--global-batch-size", "64")
    first, second = (p.training.peak(RANK, p.workload) for p in (whole, quarters))
    assert quarters.workload.num_micro_batches * 4 == whole.workload.num_micro_batches
    assert second.batch == first.batch > 0, "the same samples are prepared for the step"


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("", 0),
        ("--rollout-graph-mode full-decode --rollout-graph-sizes 8 64", 2),
        ("--rollout-graph-mode full-decode --rollout-graph-count 5", 5),
    ],
)
def test_graphs_are_those_of_the_flags(flags: str, count: int) -> None:
    assumptions = MemoryAssumptions(graph_bytes=1 << 20)
    table = prediction_of(assumptions, *RECOMPUTE, *flags.split()).rank_table(RANK)
    assert table[MemoryPhase.ROLLOUT].get(Owner.GRAPHS, 0) == count << 20
