"""Critic and reward model on real ranks: values, scores, memory, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.memory_worlds import as_predicted
from support.spawn import run_ranks
from support.tiers import slow_but
from support.training_worlds import by_sample, make_samples, start_job

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.colocation.storage_group import StorageGroup
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.core.memory import MemoryOwner
    from mindspeed_rl.core.types import TrainSample
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan
    from mindspeed_rl.samples.packing import MicroBatch
    from mindspeed_rl.trainer.train_engine import TrainEngine

pytestmark = pytest.mark.distributed

SHARDED = ("--use-distributed-optimizer",)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
WORLDS = {
    "dp2": (2, SHARDED, "qwen2-tied"),
    "tp2-pp2": (4, (*TP2, *PP2, *SHARDED), "qwen2-tied"),
    "cp2": (2, ("--context-parallel-size", "2"), "qwen3"),
    "ep2": (2, (*EP2, *SHARDED), "qwen3-moe"),
    "tp2-ep2": (2, (*TP2, *EP2, "--expert-tensor-parallel-size", "1"), "deepseek"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank saw.

    Attributes:
        values: the critic's, of every sample, gathered from all ranks.
        scores: of the reward model, of every sample.
        bytes: by owner, measured and predicted, before the first update and after it.
        resumes_alike: whether two updates give the same local weights of critic and policy when
            offload, a save and a restart come in between.
        updates: position of the critic's schedule after the restart.
    """

    values: list[torch.Tensor]
    scores: list[float]
    bytes: list[tuple[dict[str, int], dict[str, int]]]
    resumes_alike: bool
    updates: int


def value_world(world: World, flags: Sequence[str], model: str, scorer: str, save: str) -> Facts:
    """Rank function."""
    from support.batches import local_batches

    from mindspeed_rl.building.models import build_reward_model
    from mindspeed_rl.core.memory import MemoryPhase
    from mindspeed_rl.planning.prediction import MemoryPrediction
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    own = ("--rl-advantage-estimator", "gae", "--critic-hf-checkpoint", scorer)
    own += ("--critic-lr", "1e-2", "--reward-model-hf-checkpoint", scorer, "--lr", "1e-2")
    own += ("--make-vocab-size-divisible-by", "8", "--micro-batch-size", "3", "--save", save)
    job = start_job(world, model, [*flags, *own])
    samples = make_samples(VOCAB)
    policy, critic = _build(job)
    scores_by = build_reward_model(job)
    assert scores_by is not None
    batches = local_batches(job, policy, samples)
    values = by_sample(critic, batches, critic.values(batches), len(samples))
    scores = _scores(job, scores_by, samples)

    groups = trainer_memory(policy, None, critic, scores_by)
    prediction = MemoryPrediction(job.config, job.plan).rank_table(world.rank)

    def both(phase: MemoryPhase) -> tuple[dict[str, int], dict[str, int]]:
        predicted = {owner.value: prediction[phase].get(owner, 0) for owner in groups}
        return _bytes(groups), predicted

    num_bytes = [both(MemoryPhase.LOAD)]
    _train(policy, critic, batches, samples)
    num_bytes.append(both(MemoryPhase.TRAIN_IDLE))
    _train(policy, critic, batches, samples)
    whole = _weights(policy, critic)
    policy, critic = _interrupted(job, scores_by, lambda p, c: _train(p, c, batches, samples))
    updates = critic.schedule.num_updates
    _train(policy, critic, batches, samples)
    alike = all(map(torch.equal, whole, _weights(policy, critic)))
    return Facts(values, scores, num_bytes, alike, updates)


def _build(job: Job[RLRunConfig, RLPlan]) -> tuple[TrainEngine, TrainEngine]:
    """Policy and critic."""
    from mindspeed_rl.building.models import build_critic, build_engine

    critic = build_critic(job)
    assert critic is not None
    return build_engine(job, "policy", 4), critic


def _scores(
    job: Job[RLRunConfig, RLPlan], scorer: TrainEngine, samples: Sequence[TrainSample]
) -> list[float]:
    """Of the last token of every sample."""
    from support.batches import local_batches

    from mindspeed_rl.core.types import TrainSample
    from mindspeed_rl.rl.reward_model import last_token_values

    at_the_end = [TrainSample(s.sample_id, s.token_ids, s.length, token_after=0) for s in samples]
    rows = local_batches(job, scorer, at_the_end)
    ids = [s.sample_id for s in samples]
    return last_token_values(scorer, ids, [rows], job.platform.device)


def _bytes(groups: Mapping[MemoryOwner, StorageGroup]) -> dict[str, int]:
    return {owner.value: group.num_bytes() for owner, group in groups.items()}


def _interrupted(
    job: Job[RLRunConfig, RLPlan],
    scorer: TrainEngine,
    train: Callable[[TrainEngine, TrainEngine], None],
) -> tuple[TrainEngine, TrainEngine]:
    """New engines after an update, all memory away and back, a save and a load."""
    from mindspeed_rl.colocation.scheduler import ColocationPlan
    from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
    from mindspeed_rl.trainer.resident_memory import trainer_memory
    from mindspeed_rl.trainer_state import run_checkpoint
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint

    policy, critic = _build(job)
    groups = trainer_memory(policy, None, critic, scorer)
    sharing = ColocationPlan(groups, OffloadMode.ALL, wait_for_copies=job.platform.wait_for_copies)
    train(policy, critic)
    sharing.leave_all()
    assert sum(_bytes(groups).values()) == 0
    for owner in MemoryOwner:
        if owner in groups:
            groups[owner].restore()
    run_checkpoint.save(job, policy, 1, {"version": 1}, {"critic": critic})
    policy, critic = _build(job)
    config = job.config.checkpoint
    load_checkpoint(config.save, policy, config, {"critic": critic})
    return policy, critic


def _train(
    policy: TrainEngine,
    critic: TrainEngine,
    batches: Sequence[MicroBatch],
    samples: Sequence[TrainSample],
) -> None:
    """One update of both, on targets that are a function of the token."""
    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.algorithms.types import Denominators
    from mindspeed_rl.algorithms.value_loss import value_loss

    counts = Denominators.of(s.num_trained for s in samples)
    given = []
    for batch, values in zip(batches, critic.values(batches), strict=True):
        if values is not None:
            returns = batch.positions[batch.loss_mask].float().cos()
            batch = batch.with_column("old_values", values).with_column("returns", returns)
        given.append(batch)
    critic.forward_backward(given, partial(value_loss, denominators=counts, clip=0.5))
    critic.step()
    policy.forward_backward(given, lambda inputs: supervised_loss(inputs, counts.tokens))
    policy.step()


def _weights(*engines: TrainEngine) -> list[torch.Tensor]:
    return [p.detach().clone() for e in engines for p in e.named_parameters().values()]


def write_scorer(model: Path, folder: Path) -> Any:
    """A sequence classifier with one label on the body of a model; returns it as well."""
    from transformers import AutoModelForSequenceClassification

    scorer = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        scorer.score.weight.normal_(0.0, 0.2, generator=generator)
    scorer.save_pretrained(folder)
    return scorer.eval()


@pytest.mark.parametrize("name", slow_but(WORLDS, ["dp2"]))
def test_value_models(name: str, tmp_path: Path) -> None:
    """Values are transformers', bytes are those predicted, a resumed run is the whole one."""
    ranks, flags, family = WORLDS[name]
    model = write_family_model(FAMILY_CASES[family], tmp_path / "model")
    scorer = write_scorer(model, tmp_path / "scorer")
    args = (flags, str(model), str(tmp_path / "scorer"), str(tmp_path / "save"))
    facts: list[Facts] = run_ranks(value_world, ranks, work_dir=tmp_path, args=args)
    samples = make_samples(VOCAB)
    with torch.no_grad():
        pooled = [float(scorer(s.token_ids[None]).logits[0, 0]) for s in samples]
        body = [scorer.model(s.token_ids[None]).last_hidden_state[0] for s in samples]
        values = [
            scorer.score(h[s.num_prompt_tokens - 1 : -1])[:, 0]
            for s, h in zip(samples, body, strict=True)
        ]
    for fact in facts:
        assert fact.scores == pytest.approx(pooled, abs=2e-5)
        torch.testing.assert_close(fact.values, values, rtol=0, atol=2e-5)
        for measured, predicted in fact.bytes:
            assert measured == as_predicted(predicted)
        assert min(measured.values()) > 0
        assert fact.resumes_alike and fact.updates == 1
