"""Rank functions that save and resume on emulated NPUs, with and without a swapped optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from ascend.late_copies import late_copies
from support.training_worlds import in_hf_coordinates, make_samples

from mindspeed_rl.algorithms.losses import supervised_loss
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan
    from mindspeed_rl.trainer.train_engine import TrainEngine

NUM_STEPS, SAVED_STEP = 4, 2
VOCAB = 67
# 67 ids pad to 72 rows on one tensor-parallel rank and on two. Warm-up and decay, so that a
# schedule that counts wrongly shows.
FLAGS = (
    *("--micro-batch-size", "3", "--make-vocab-size-divisible-by", "36"),
    *("--lr", "1e-2", "--lr-warmup-iters", "1", "--lr-decay-iters", "8"),
    *("--lr-decay-style", "cosine", "--weight-decay", "0.1", "--use-distributed-optimizer"),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """What the steps of a part of a run gave.

    Attributes:
        steps: (gradient norm, learning rate) of each.
        local: this rank's parameters after the last step.
        weights: the whole model by HF name, on rank 0.
    """

    steps: list[tuple[float, float]]
    local: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def build(
    world: World, folder: str, flags: Sequence[str]
) -> tuple[Job[RLRunConfig, RLPlan], TrainEngine]:
    """A job and its policy, with all random states as at the start of a run."""
    from support.training_worlds import start_job

    job = start_job(world, folder, [*FLAGS, *flags])
    return job, rebuild(job)


def rebuild(job: Job[RLRunConfig, RLPlan]) -> TrainEngine:
    """Another policy in the same world."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.launch.bootstrap import seed_everything

    model_parallel_cuda_manual_seed(job.config.train.seed)
    seed_everything(job.config.train.seed)
    return build_engine(job, "policy", NUM_STEPS)


def train(job: Job[RLRunConfig, RLPlan], engine: TrainEngine, start: int, stop: int) -> Trace:
    """Steps start+1 .. stop, each on samples of its own."""
    from support.batches import local_batches

    steps = []
    for step in range(start + 1, stop + 1):
        samples = make_samples(VOCAB, seed=step)
        num_tokens = sum(s.num_trained for s in samples)
        batches = local_batches(job, engine, samples)
        engine.forward_backward(batches, partial(supervised_loss, num_tokens=num_tokens))
        stats = engine.step()
        steps.append((stats.grad_norm, stats.learning_rate))
    parameters = engine.named_parameters()
    local = {name: p.detach().cpu() for name, p in parameters.items()}
    floats = {name: p.detach().float() for name, p in parameters.items()}
    return Trace(steps, local, in_hf_coordinates(job, floats))


def whole_and_half_world(
    world: World, model: str, flags: Sequence[str], folder: str
) -> tuple[Trace, int]:
    """All steps without saving; then, anew, the first half, a save, and an export.

    Copies of the second run are late. Also returns how many were.
    """
    from mindspeed_rl.rl.export import export_policy
    from mindspeed_rl.trainer_state.checkpoint import save_checkpoint

    job, engine = build(world, model, flags)
    whole = train(job, engine, 0, NUM_STEPS)
    with late_copies() as late:
        engine = rebuild(job)
        train(job, engine, 0, SAVED_STEP)
        save_checkpoint(f"{folder}/save", SAVED_STEP, engine, {"kept": 7})
        export_policy(job, engine, f"{folder}/hf", SAVED_STEP)
    return whole, late.num_done


def staged_and_copied_world(
    world: World, model: str, flags: Sequence[str], folder: str
) -> tuple[Trace, Trace]:
    """The first half, then the rest twice: from the live state, and from a copy in memory of it.

    A checkpoint of the first half is staged, and written when the run has gone on, as ``staged``;
    what was restored is saved as ``restored``. Copies to the host are late.
    """
    from mindspeed_rl.checkpoint.staging import StagingMemory
    from mindspeed_rl.peers.state import plain_of, restore, tensors_of
    from mindspeed_rl.trainer_state.checkpoint import plan_checkpoint, save_checkpoint

    job, engine = build(world, model, flags)
    engines = {"policy": engine}
    with late_copies() as late:
        train(job, engine, 0, SAVED_STEP)
        unwritten = plan_checkpoint(
            f"{folder}/staged", SAVED_STEP, engine, {"kept": 7},
            with_optimizer=True, with_rng=True, companions={},
        )  # fmt: skip
        unwritten.stage(StagingMemory())
        copy = {name: tensor.cpu().clone() for name, tensor in tensors_of(engines).items()}
        plain = plain_of(engines)
        first = train(job, engine, SAVED_STEP, NUM_STEPS)
        unwritten.check_values()
        unwritten.write()
        restore(engines, copy, plain)
        assert list(differing(engine)) == []
        save_checkpoint(f"{folder}/restored", SAVED_STEP, engine, {"kept": 7})
        again = train(job, engine, SAVED_STEP, NUM_STEPS)
    assert late.num_done > 100, "no copy was late"
    return first, again


def resume_world(
    world: World, model: str, flags: Sequence[str], folder: str, copy: str, dirty: bool
) -> tuple[Trace, dict[str, list[str]]]:
    """The rest of the run, in new processes; what was loaded is saved once more, as ``copy``.

    With ``dirty`` the engine has taken a step of another run, whose copies are not done yet. Also
    returns the parameters of which the weights and their masters do not agree: after the
    optimizer was loaded, and after the weights alone were.
    """
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job, engine = build(world, model, flags)
    differ = {}
    with late_copies() if dirty else nullcontext():
        if dirty:
            train(job, engine, 7, 8)
            load_checkpoint(f"{folder}/save", engine, CheckpointConfig(finetune=True))
            differ["weights"] = list(differing(engine))
            train(job, engine, 8, 9)
        loaded = load_checkpoint(f"{folder}/save", engine, CheckpointConfig())
        assert loaded.step == SAVED_STEP and loaded.extra == {"kept": 7}
        differ["all"] = list(differing(engine))
        save_checkpoint(f"{folder}/{copy}", SAVED_STEP, engine, {})
        return train(job, engine, SAVED_STEP, NUM_STEPS), differ


def differing(engine: TrainEngine) -> Iterator[str]:
    """Parameters whose master on the host is not the weight, or whose state is on the device.

    None where nothing is swapped.
    """
    from mindspeed_rl.trainer.patches import swapped_optimizer

    if not swapped_optimizer.is_used():
        return
    names = {param: name for name, param in engine.named_parameters().items()}
    torch.npu.synchronize()
    for part in engine.optimizer.chained_optimizers:
        for group, shards in zip(
            part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True
        ):
            for param, master in zip(group, shards, strict=True):
                yield from _differing(part, names[param], param, master)


def _differing(part: Any, name: str, param: torch.Tensor, master: torch.Tensor) -> Iterator[str]:
    place = part._get_model_param_range_map(param)["param"]
    mine = param.detach().cpu().flatten()[place.start : place.end]
    host, device = part.param_to_cpu_states_map[master], part.optimizer.state[master]
    if not torch.equal(host["param"].to(mine.dtype), mine):
        yield name
    for tensor in (master, device["exp_avg"], device["exp_avg_sq"]):
        if tensor.untyped_storage().nbytes():
            yield f"{name} on the device"
