"""Teachers in the steps of a run: what they say reaches the gradient of their samples' tokens.

Policy and teachers are tables: see ``test_step``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.rl_run import COUNTS, REWARDS, TablePolicy, TableRun, by_sample, make_run, value
from support.table_engine import VOCAB, first_table, response_of

from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.rl.batches import StepBatches

SHIFTS = {"near": 0.25, "far": -0.75}
FLAGS = (
    "--rl-advantage-estimator none --teacher-hf-checkpoint near=DIR far=DIR --teacher-key from "
    "--teacher-weight 0.5"
)
OF_PROMPT = ("near", "far")  # of even and of odd rows


def taught(folder: Path, flags: str = FLAGS) -> TableRun:
    """A run whose rows name a teacher each."""
    run = make_run(folder, flags.replace("DIR", str(folder)), REWARDS)
    tables = {
        name: TablePolicy(first_table() + shift * torch.arange(VOCAB) / VOCAB)
        for name, shift in SHIFTS.items()
    }
    run.set_models(teachers=tables)
    data = run.parts.data
    rows = [
        replace(prompt, metadata={"from": OF_PROMPT[prompt.index % 2]}) for prompt in data.train
    ]
    run.parts = replace(run.parts, data=replace(data, train=cast(Any, rows)))
    return run


def gain(sample_id: int, batches: StepBatches) -> torch.Tensor:
    """log p(teacher) - log p(policy) of the tokens of a sample."""
    (prompt,) = [s.prompt_index for s in batches.placed.samples if s.sample_id == sample_id]
    return SHIFTS[OF_PROMPT[prompt % 2]] * torch.tensor(response_of(sample_id)) / VOCAB


def test_every_sample_has_its_own_teacher(tmp_path: Path) -> None:
    run = taught(tmp_path)
    moves = run.moves_of((MemoryOwner.TEACHERS,))
    batches = run.batches()
    assert moves == ["teachers here", "teachers away"]
    found = by_sample(batches, "teacher_logprobs")
    for i in range(6):
        policy = first_table()[list(response_of(i))]
        torch.testing.assert_close(torch.tensor(found[i]), policy + gain(i, batches))
    assert value(batches.metrics, "forward/teachers") == 2
    assert value(batches.metrics, "forward/old") == 0, "the update knows the policy's log-probs"


def test_the_gradient_of_a_step_is_that_of_the_teachers_alone(tmp_path: Path) -> None:
    """-0.5 x gain / N at each token; rewards count for nothing."""
    run = taught(tmp_path)
    batches = run.batches()
    metrics = run.update(batches)
    (found,) = run.policy.gradients
    wanted, total = torch.zeros(VOCAB), 0.0
    for i in range(6):
        gains = gain(i, batches)
        wanted.index_add_(0, torch.tensor(response_of(i)), -0.5 * gains / sum(COUNTS))
        total += float(gains.sum())
    torch.testing.assert_close(found, wanted)
    assert value(metrics, "distillation/reverse_kl") == pytest.approx(-total / sum(COUNTS))
