"""Teachers on real ranks: what they say, and the gradient that follows, in every kind of layout.

The reference is transformers on one rank: log-probs of the teacher, and autograd through the
definition of the KL. The teacher has another width and depth than the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.memory_worlds import as_predicted
from support.spawn import run_ranks
from support.tiers import slow_but
from support.training_worlds import (
    by_sample,
    in_hf_coordinates,
    make_samples,
    relative_errors,
    start_job,
)

from mindspeed_rl.launch.bootstrap import World

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.7
WORLDS = {
    "dp2": (2, ()),
    "tp2": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "cp2": (2, ("--context-parallel-size", "2")),
    "tp2-pp2": (
        4,
        ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    ),
}
WIDER = FAMILY_CASES["qwen3"]
TEACHER = replace(WIDER, changes={**WIDER.changes, "hidden_size": 72, "num_hidden_layers": 2})


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rank saw.

    Attributes:
        logprobs: the teacher's, of every sample, 1.0 where it has no teacher.
        gradients: of the policy by HF name, for the full KL; on rank 0.
        kl: sum over all trained tokens that have a teacher.
        bytes: of the teacher, measured and predicted.
    """

    logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    kl: float
    bytes: tuple[int, int]


def with_teacher(sample_id: int) -> bool:
    return sample_id % 3 != 1


def distilling_world(world: World, flags: Sequence[str], model: str, teacher: str) -> Facts:
    """Rank function."""
    from support.batches import local_batches

    from mindspeed_rl.building.models import build_engine, build_teachers
    from mindspeed_rl.core.memory import MemoryOwner, MemoryPhase
    from mindspeed_rl.distillation.teachers import with_teachers
    from mindspeed_rl.planning.prediction import MemoryPrediction
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    own = ("--teacher-hf-checkpoint", f"wide={teacher}", "--make-vocab-size-divisible-by", "8")
    own += ("--rl-default-temperature", str(TEMPERATURE), "--micro-batch-size", "3")
    samples = make_samples(VOCAB)
    of_sample = {s.sample_id: "wide" for s in samples if with_teacher(s.sample_id)}

    job = start_job(world, model, [*flags, *own])
    policy = build_engine(job, "policy", 1, TEMPERATURE)
    teachers = build_teachers(job, policy)
    told = with_teachers(teachers, of_sample, False, local_batches(job, policy, samples))
    # 1.0, which no log-prob is, in place of NaN, which equals nothing.
    columns = [
        batch.columns["teacher_logprobs"].nan_to_num(1.0) if policy.is_last_stage else None
        for batch in told
    ]
    logprobs = by_sample(policy, told, columns, len(samples))
    groups = trainer_memory(policy, teachers=[*teachers.values()])
    predicted = MemoryPrediction(job.config, job.plan).rank_table(world.rank)[MemoryPhase.LOAD]
    owner = MemoryOwner.TEACHERS
    num_bytes = (groups[owner].num_bytes(), as_predicted({owner.value: predicted[owner]})[owner])

    job = start_job(world, model, [*flags, *own, "--teacher-kl", "full"])
    policy = build_engine(job, "policy", 1, TEMPERATURE)
    teachers = build_teachers(job, policy)
    batches = with_teachers(teachers, of_sample, True, local_batches(job, policy, samples))
    seen: list[float] = []
    policy.forward_backward(batches, kl_loss(seen))
    policy.gather_gradients()
    gradients = in_hf_coordinates(job, policy.gradients())
    total = torch.tensor(sum(seen) if policy.is_metrics_rank else 0.0)
    torch.distributed.all_reduce(total)
    return Facts(logprobs, gradients, float(total), num_bytes)


def kl_loss(seen: list[float]) -> Any:
    """The sum of the KL of all tokens."""
    from mindspeed_rl.algorithms.types import LossInputs, LossOutputs

    def loss(inputs: LossInputs) -> LossOutputs:
        assert inputs.teacher_kl is not None
        seen.append(float(inputs.teacher_kl.detach().sum()))
        return LossOutputs(inputs.teacher_kl.sum())

    return loss


def reference(
    model: Path, teacher: Path
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], float]:
    """Log-probs of the teacher, gradient of the policy by the summed KL, and that sum."""
    from transformers import AutoModelForCausalLM

    policy, other = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (model, teacher)
    )
    logprobs, total = [], torch.zeros((), dtype=torch.float64)
    for sample in make_samples(VOCAB):
        ids = sample.token_ids[None]
        rows = slice(sample.num_prompt_tokens - 1, -1)
        logp = (policy(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            logq = (other(ids).logits[0, rows] / TEMPERATURE).log_softmax(-1)
        targets = sample.token_ids[sample.num_prompt_tokens :]
        found = logq.gather(-1, targets[:, None])[:, 0]
        if not with_teacher(sample.sample_id):
            logprobs.append(torch.ones_like(found))
            continue
        logprobs.append(found)
        total = total + (logp.exp() * (logp - logq)).sum()
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return [part.float() for part in logprobs], gradients, float(total.detach())


@pytest.mark.parametrize("name", slow_but(WORLDS, ["tp2"]))
def test_teachers(name: str, tmp_path: Path) -> None:
    """Log-probs, KL and gradient are transformers'; bytes are those predicted."""
    ranks, flags = WORLDS[name]
    model = write_family_model(FAMILY_CASES["qwen3"], tmp_path / "model")
    teacher = write_family_model(TEACHER, tmp_path / "teacher", seed=5)
    facts: list[Facts] = run_ranks(
        distilling_world, ranks, work_dir=tmp_path, args=(flags, str(model), str(teacher))
    )
    logprobs, gradients, kl = reference(model, teacher)
    assert kl > 1.0
    for fact in facts:
        torch.testing.assert_close(fact.logprobs, logprobs, rtol=0, atol=2e-5)
        assert fact.kl == pytest.approx(kl, rel=1e-5)
        assert fact.bytes[0] == fact.bytes[1] > 0
    errors = relative_errors(facts[0].gradients, gradients)
    assert max(errors.values()) < 2e-5, errors
