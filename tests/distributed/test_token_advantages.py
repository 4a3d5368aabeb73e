"""Advantages of tokens are those of whole sequences and the whole step on any rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.spawn import run_ranks

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.samples.rollout_info import RolloutInfo

pytestmark = pytest.mark.distributed

LENGTHS = (9, 3, 1, 20, 6, 2)
REWARDS = (1.0, 0.0, 0.5, float("nan"), 2.0, -1.0)
GAMMA, BETA, TRACE = 0.9, 0.1, 0.8
FLAGS = {
    "returns": "--rl-advantage-estimator reinforce_plus_plus --rl-gamma 0.9 --grpo-kl-beta 0.1 "
    "--rl-kl-in-reward --rl-kl-estimator k1",
    "group": "--rl-advantage-estimator dr_grpo --grpo-kl-beta 0.1 --rl-kl-in-reward "
    "--rl-kl-estimator k1",
    "gae": "--rl-advantage-estimator gae --rl-gamma 0.9 --gae-lambda 0.8 --grpo-kl-beta 0.1 "
    "--rl-kl-in-reward --rl-kl-estimator k1",
}


def make_samples() -> tuple[list[RolloutInfo], list[TrainSample]]:
    """Old log-probs are the engine's; the reference's are 0.02 x place below them."""
    generator = torch.Generator().manual_seed(0)
    samples, rows = [], []
    for i, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        ids = torch.randint(5, 300, (4 + length,), generator=generator)
        logprobs = -torch.rand(length, generator=generator)
        samples.append(RolloutInfo(i, 0, length, length, True, 0, 0, reward))
        rows.append(TrainSample(i, ids, 4, {"rollout_logprobs": logprobs}))
    return samples, rows


def advantages_in(world: World, model: str) -> dict[str, dict[str, list[torch.Tensor]]] | None:
    """Rank function: of every token, by layout and estimator; on rank 0."""
    from support.batches import local_batches
    from support.training_worlds import by_sample, make_job

    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.rl.advantages import compute_advantages
    from mindspeed_rl.rl.batches import OptimizerBatch, StepBatches
    from mindspeed_rl.rl.components import RunState
    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.selftest.loss import Layout

    samples, rows = make_samples()
    result: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, layout in (("dp2", Layout()), ("cp2", Layout(cp=2)), ("pp2", Layout(pp=2))):
        job = make_job(world, model, ["--micro-batch-size", "2", "--grpo-group-size", "3"])
        with selftest.in_layout(job, layout) as models:
            local, engine = models.job, models.policy
            result[name] = {}
            for estimator, flags in FLAGS.items():
                batches = local_batches(local, engine, rows)
                annotated = []
                for b in batches:
                    places = b.positions[b.loss_mask] - 3
                    known = b.column("rollout_logprobs")
                    b = b.with_column("old_logprobs", known)
                    b = b.with_column("ref_logprobs", known - 0.02 * places)
                    annotated.append(b.with_column("old_values", 0.3 * places.float().cos()))
                config = make_job(world, model, [*flags.split(), "--grpo-group-size", "3"]).config
                plan = SimpleNamespace(batch=SimpleNamespace(group_size=3))
                run = SimpleNamespace(
                    config=config, plan=plan, job=local, models=SimpleNamespace(policy=engine)
                )
                step = StepBatches(
                    [OptimizerBatch(annotated, Denominators(41, 6))], cast(Any, None)
                )
                state = RunState(cast(Any, None), kl_beta=BETA)
                micro = compute_advantages(cast(Any, run), state, step, samples).micro_batches
                found = [m.columns.get("advantages") for m in micro]
                result[name][estimator] = by_sample(engine, micro, found, len(samples))
    return result if world.rank == 0 else None


def expected(estimator: str) -> list[np.ndarray]:
    """One sample after the other; the abstained one has no part in anything."""
    kl = [BETA * 0.02 * np.arange(n) for n in LENGTHS]
    if estimator == "group":
        totals = np.array(REWARDS) - np.array([k.sum() for k in kl])
        means = [np.nanmean(totals[g : g + 3]) for g in (0, 3)]
        return [np.full(n, np.nan_to_num(t - means[i // 3]))
                for i, (n, t) in enumerate(zip(LENGTHS, totals, strict=True))]  # fmt: skip
    rows = []
    for n, reward, penalty in zip(LENGTHS, REWARDS, kl, strict=True):
        tokens = -penalty
        tokens[-1] += reward
        decay = GAMMA
        if estimator == "gae":
            values = np.append(0.3 * np.cos(np.arange(n)), 0.0)
            tokens += GAMMA * values[1:] - values[:-1]
            decay *= TRACE
        rows.append(
            np.array([sum(decay ** (k - t) * tokens[k] for k in range(t, n)) for t in range(n)])
        )
    known = np.concatenate([r for r, reward in zip(rows, REWARDS, strict=True) if reward == reward])
    return [np.nan_to_num((r - known.mean()) / known.std(ddof=1)) * (reward == reward)
            for r, reward in zip(rows, REWARDS, strict=True)]  # fmt: skip


def test_they_are_those_of_whole_sequences_in_every_layout(tmp_path: Path) -> None:
    from make_tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "model" / "any", num_layers=2)
    found = run_ranks(advantages_in, 2, work_dir=tmp_path, args=(str(model),))[0]
    assert set(found) == {"dp2", "cp2", "pp2"}
    for layout, by_estimator in found.items():
        for estimator, values in by_estimator.items():
            for found_row, row in zip(values, expected(estimator), strict=True):
                assert found_row.tolist() == pytest.approx(row, rel=1e-5, abs=1e-6), (
                    layout, estimator,
                )  # fmt: skip
