"""Worlds that build real TrainEngines and measure their memory next to what is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from support.table_engine import CompareWeights, CopyWeights, TableEngine, first_table
from support.training_worlds import make_job

from mindspeed_rl.algorithms.losses import supervised_loss
from mindspeed_rl.bootstrap import World
from mindspeed_rl.memory.assumptions import MemoryAssumptions
from mindspeed_rl.memory.model_state import registration_key
from mindspeed_rl.memory.owners import MemoryPhase, OffloadMode, Owner
from mindspeed_rl.memory.prediction import MemoryPrediction, predict
from mindspeed_rl.memory.training import Workload
from mindspeed_rl.observability.tensor_tracker import TensorTracker
from mindspeed_rl.offload.storages import num_bytes, storages_of
from mindspeed_rl.phases.machine import Phases, Sharing
from mindspeed_rl.phases.weight_sync import WeightSync
from mindspeed_rl.samples.packing import TrainSample

if TYPE_CHECKING:
    from mindspeed_rl.samples.packing import MicroBatch
    from mindspeed_rl.trainer.train_engine import TrainEngine

NUM_SAMPLES, LENGTH = 4, 48
_EXPERTS = "mlp.experts"


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """One model with flags of its own."""

    name: str
    model: str
    flags: tuple[str, ...] = ()
    borders: bool = False  # all offload modes are walked through as well


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
        borders: ``mode/state`` -> bytes by owner, measured and predicted.
    """

    owners: dict[str, int]
    predicted: dict[str, int]
    optimizer_at_start: int
    predicted_at_start: int
    in_step: int
    predicted_in_step: int
    grad_norm: float
    in_order: bool
    borders: dict[str, tuple[dict[str, int], dict[str, int]]]


def measure_world(
    world: World, layout: Sequence[str], cases: Sequence[MemoryCase]
) -> dict[str, Measured]:
    """Rank function: build every case, measure, predict."""
    from mindspeed_rl.rl.build_models import build_engine, initialize_parallel

    results: dict[str, Measured] = {}
    for case in cases:
        job = make_job(world, case.model, [*layout, *case.flags])
        if not results:
            initialize_parallel(job)
        engine = build_engine(job, "policy", 1)
        measured = _measure(job, engine)
        if case.borders:
            reference = build_engine(job, "reference", 0)
            measured = replace(measured, borders=walk_borders(job, engine, reference))
        results[case.name] = measured
    return results


def _measure(job: Any, engine: TrainEngine) -> Measured:
    from support.batches import local_batches

    vocab = job.plan.spec.vocab_size
    generator = torch.Generator().manual_seed(0)
    samples = [
        TrainSample(i, torch.randint(5, vocab, (LENGTH,), generator=generator), 1)
        for i in range(NUM_SAMPLES)
    ]
    batches = local_batches(job, engine, samples)
    at_start = _optimizer_bytes(engine)
    tracker = TensorTracker()
    num_tokens = NUM_SAMPLES * (LENGTH - 1)
    with tracker, _routed_tokens(engine) as routed:
        engine.forward_backward(batches, lambda inputs: supervised_loss(inputs, num_tokens))
    stats = engine.step()
    full = job.config.train.recompute_granularity == "full"
    assumptions = MemoryAssumptions(train_imbalance=_imbalance(engine, routed, full))
    prediction = predict(job.config, job.plan, assumptions, work=_workload(job, batches))
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
        borders={},
    )


@contextmanager
def _routed_tokens(engine: TrainEngine) -> Iterator[list[int]]:
    """Tokens that reach this rank's experts, one number per pass through a layer."""
    found: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.append(inputs[0].size(0))

    experts = [m for top in engine.modules for n, m in top.named_modules() if n.endswith(_EXPERTS)]
    hooks = [module.register_forward_pre_hook(note) for module in experts]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _imbalance(engine: TrainEngine, routed: Sequence[int], full: bool) -> float:
    """This rank's tokens by the mean of its expert-parallel group, at the fullest moment.

    Collective: the expert-parallel group. That is one micro-batch in all layers of the stage, or,
    where layers are recomputed one by one, in one of them.
    """
    if not routed:
        return 1.0
    group = parallel_state.get_expert_model_parallel_group()
    mine = torch.tensor(routed, dtype=torch.float64)
    mean = mine.clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    layers = sum(n.endswith(_EXPERTS) for top in engine.modules for n, _ in top.named_modules())
    window = 1 if full else layers
    kept = [x.unfold(0, window, 1).sum(1) for x in (mine, mean)]
    return max(1.0, float((kept[0] / kept[1]).max()))


def walk_borders(
    job: Any, policy: TrainEngine, reference: TrainEngine
) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """There and back in every offload mode, the engine a double; bytes at every border."""
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    groups = trainer_memory(policy, reference)
    found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for mode in (OffloadMode.NONE, OffloadMode.OPTIMIZER, OffloadMode.ALL):
        prediction = predict(job.config, job.plan, MemoryAssumptions(offload=mode))

        def look(
            state: str, mode: OffloadMode = mode, prediction: MemoryPrediction = prediction
        ) -> None:
            measured = _owners(policy) | {
                Owner.REFERENCE.value: _bytes(
                    [p.data for module in reference.modules for p in module.parameters()]
                )
            }
            expected = prediction.border(job.world.rank, state)
            found[f"{mode.value}/{state}"] = (measured, {o: expected.get(o, 0) for o in measured})

        sharing = Sharing(groups, mode, at_border=look)
        sharing.leave_all()
        table = {"table": first_table()}
        sync = WeightSync(
            cast(Any, CopyWeights()), cast(Any, CompareWeights()), lambda table=table: table, 0
        )
        phases = Phases(TableEngine(), sync, lambda name: nullcontext(), sharing)
        phases.to_train()
        phases.to_rollout(0)
        phases.to_train()
        for group in groups.values():
            group.restore()
    return found


def _is_sorted(module: torch.nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == sorted(names, key=registration_key)


def _workload(job: Any, batches: Sequence[MicroBatch]) -> Workload:
    """What the packed batches are; every sample is as long as the others."""
    sequences = max(len(b.sample_ids) for b in batches)
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
