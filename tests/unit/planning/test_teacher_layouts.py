"""Teachers in a configuration: their layouts and memory, or the reason for a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checked_runs import plan_of_models

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.memory import MemoryOwner, MemoryPhase, OffloadMode
from mindspeed_rl.planning.phase_limits import passes
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import RLPlan

TWO = "--teacher-hf-checkpoint math=DIR/small code=DIR/wide"
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 24}
WIDE: dict[str, Any] = {"hidden_size": 96}


def plan_of(folder: Path, flags: str, **changes: dict[str, Any]) -> tuple[RLRunConfig, RLPlan]:
    """A run with these models, or others in place of some."""
    return plan_of_models(folder, flags, {"policy": {}, "small": SMALL, "wide": WIDE} | changes)


def test_teachers_have_sizes_of_their_own_and_the_cut_of_the_policy(tmp_path: Path) -> None:
    _, plan = plan_of(tmp_path, TWO)
    assert list(plan.teachers) == ["math", "code"]
    assert [t.spec.num_layers for t in plan.teachers.values()] == [2, plan.spec.num_layers]
    assert [t.spec.hidden_size for t in plan.teachers.values()] == [24, 96]
    assert [(t.parallel.tp, t.parallel.pp) for t in plan.teachers.values()] == [(2, 2)] * 2
    assert not any(t.spec.value_head for t in plan.teachers.values())
    assert plan_of(tmp_path, "")[1].teachers == {}


def test_memory_of_teachers_is_predicted(tmp_path: Path) -> None:
    """The parameters of all; with the full KL on the device during the update as well."""

    def table(flags: str, phase: MemoryPhase) -> dict[MemoryOwner, int]:
        config, plan = plan_of(tmp_path, flags)
        prediction = MemoryPrediction(config, plan)
        found: dict[MemoryOwner, int] = replace(prediction, offload=OffloadMode.ALL).rank_table(3)[
            phase
        ]
        return found

    owner = MemoryOwner.TEACHERS
    both = table(TWO, MemoryPhase.LOAD)[owner]
    alone = [
        table(f"--teacher-hf-checkpoint DIR/{n}", MemoryPhase.LOAD)[owner]
        for n in ("small", "wide")
    ]
    assert both == sum(alone) > max(alone) > 0
    assert owner not in table(TWO, MemoryPhase.ROLLOUT)
    sampled, full = (table(f"{TWO} {kl}", MemoryPhase.TRAIN) for kl in ("", "--teacher-kl full"))
    assert owner not in sampled and full[owner] == both
    # hidden states of the widest teacher in fp32 and the number of the teacher, of all trained
    # tokens of the step, if every row of 32 tokens held nothing but responses
    kept = full[MemoryOwner.ACTIVATIONS] - sampled[MemoryOwner.ACTIVATIONS]
    assert kept == plan_of(tmp_path, TWO)[1].batch.samples * 32 * (96 * 4 + 4)


def testpasses_of_teachers_lengthen_the_limit_of_training(tmp_path: Path) -> None:
    without, two = (passes(*plan_of(tmp_path, flags)) for flags in ("", TWO))
    assert two == without + 2


@pytest.mark.parametrize(
    ("flags", "changes", "told"),
    [
        ("--teacher-hf-checkpoint DIR/other", {"vocab_size": 300},
         "--teacher-hf-checkpoint .*: a vocabulary of 300, the policy has 307"),
        ("--teacher-hf-checkpoint DIR/other", {"num_hidden_layers": 3},
         "--pipeline-model-parallel-size 2"),
        ("--teacher-hf-checkpoint DIR/nowhere", {},
         "--teacher-hf-checkpoint .*nowhere: .*config.json is missing"),
        ("--teacher-hf-checkpoint DIR/small DIR/wide", {}, "small has no name; write several"),
        ("--teacher-hf-checkpoint DIR/other --teacher-kl full", {"vocab_size": 900},
         "--teacher-kl full: the vocabulary of teacher one has 1024 rows with padding and the "
         "policy's 512"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused(
    tmp_path: Path, flags: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        plan_of(tmp_path, flags, other=changes)
