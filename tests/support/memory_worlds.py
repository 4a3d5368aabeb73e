"""Worlds that build real TrainEngines and measure their memory next to what is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from support.training_worlds import make_job

from mindspeed_rl.algorithms.losses import supervised_loss
from mindspeed_rl.bootstrap import World
from mindspeed_rl.data.packing import TrainSample
from mindspeed_rl.memory.model_state import registration_key
from mindspeed_rl.memory.owners import MemoryPhase, Owner
from mindspeed_rl.memory.prediction import predict
from mindspeed_rl.memory.training import Workload
from mindspeed_rl.observability.tensor_tracker import TensorTracker
from mindspeed_rl.offload.storages import num_bytes, storages_of

if TYPE_CHECKING:
    from mindspeed_rl.trainer.train_engine import PreparedBatch, TrainEngine

NUM_SAMPLES, LENGTH = 4, 48


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """One model with flags of its own."""

    name: str
    model: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """A case on one rank, bytes.

    Attributes:
        owners: measured by walking the objects, after the first update.
        predicted: the same owners.
        optimizer_at_start: measured before the first update.
        predicted_at_start: the same.
        in_step: measured largest moment of forward and backward passes.
        predicted_in_step: the same.
        grad_norm: of the first update.
        in_order: whether parameters are registered in the order that the model counts on.
    """

    owners: dict[str, int]
    predicted: dict[str, int]
    optimizer_at_start: int
    predicted_at_start: int
    in_step: int
    predicted_in_step: int
    grad_norm: float
    in_order: bool


def measure_world(
    world: World, layout: Sequence[str], cases: Sequence[MemoryCase]
) -> dict[str, Measured]:
    """Rank function: build every case, measure, predict."""
    from mindspeed_rl.orchestration import training

    results: dict[str, Measured] = {}
    for case in cases:
        job = make_job(world, case.model, [*layout, *case.flags])
        if not results:
            training.initialize_parallel(job)
        engine = training.build_engine(job, "policy", 1)
        results[case.name] = _measure(job, engine)
    return results


def _measure(job: Any, engine: TrainEngine) -> Measured:
    from mindspeed_rl.orchestration import training

    vocab = job.plan.spec.vocab_size
    generator = torch.Generator().manual_seed(0)
    samples = [
        TrainSample(i, torch.randint(5, vocab, (LENGTH,), generator=generator), 1)
        for i in range(NUM_SAMPLES)
    ]
    batches = training.local_batches(job, engine, samples)
    at_start = _optimizer_bytes(engine)
    tracker = TensorTracker()
    num_tokens = NUM_SAMPLES * (LENGTH - 1)
    with tracker:
        engine.forward_backward(batches, lambda inputs: supervised_loss(inputs, num_tokens))
    stats = engine.step()
    prediction = predict(job.config, job.plan, work=_workload(job, batches))
    rank = job.world.rank
    table = prediction.rank_table(rank)
    peak = prediction.training.peak(rank, prediction.workload)
    owners = _owners(engine)
    return Measured(
        owners=owners,
        predicted={name: table[MemoryPhase.TRAIN_IDLE].get(Owner(name), 0) for name in owners},
        optimizer_at_start=at_start,
        predicted_at_start=table[MemoryPhase.LOAD].get(Owner.OPTIMIZER, 0),
        in_step=tracker.peak_bytes,
        predicted_in_step=peak.in_step,
        grad_norm=stats.grad_norm,
        in_order=all(_is_sorted(module) for module in engine.modules),
    )


def _is_sorted(module: torch.nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == sorted(names, key=registration_key)


def _workload(job: Any, batches: Sequence[PreparedBatch]) -> Workload:
    """What the packed batches are; every sample is as long as the others."""
    sequences = max(len(b.batch.sample_ids) for b in batches)
    return Workload(
        tokens=batches[0].batch.num_tokens * job.plan.parallel.cp,
        sequence=LENGTH,
        trained=sequences * (LENGTH - 1),
        num_micro_batches=len(batches),
    )


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return num_bytes(storages_of(tensors))


def _owners(engine: TrainEngine) -> dict[str, int]:
    """Storages behind parameters, gradients and optimizer state, walked without the product."""
    parameters = [p.data for module in engine.modules for p in module.parameters()]
    gradients = [p.main_grad for module in engine.modules for p in module.parameters()]
    return {
        Owner.PARAMETERS.value: _bytes(parameters),
        Owner.GRAD_BUFFERS.value: _bytes(gradients),
        Owner.OPTIMIZER.value: _optimizer_bytes(engine),
    }


def _optimizer_bytes(engine: TrainEngine) -> int:
    from mindspeed_rl.trainer.optimizer import torch_optimizers

    model = {p.untyped_storage().data_ptr() for m in engine.modules for p in m.parameters()}
    found = []
    for optimizer in torch_optimizers(engine.optimizer):
        for group in optimizer.param_groups:
            for main in group["params"]:
                state = optimizer.state.get(main, {}).values()
                found += [main.data, *(t for t in state if isinstance(t, torch.Tensor) and t.dim())]
    return _bytes([t for t in found if t.untyped_storage().data_ptr() not in model])
