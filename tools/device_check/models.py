"""The stages with a model: updates, memory that leaves and returns, an engine beside the trainer.

The trainer's stages do not import the engine, so that they run where it is not installed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from device_check import ranks
from device_check.child import Setting
from device_check.results import Notes, Recorder, StageFailed

if TYPE_CHECKING:
    from mindspeed_rl.colocation.scheduler import ColocationPlan, DeviceScheduler
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan
    from mindspeed_rl.rollout.engine import InferenceEngine
    from mindspeed_rl.trainer.train_engine import TrainEngine
    from mindspeed_rl.weights.sync import WeightSync

MIB = 2**20
UPDATES = 3
# Mean difference of log-probs that rounding explains, in bfloat16 and in fp32.
HALF_LIMIT, FULL_LIMIT = 0.05, 1e-3


@dataclass(slots=True)
class DeviceWork:
    """The trainer, and later the engine, of a process."""

    job: Job[RLRunConfig, RLPlan]
    policy: TrainEngine
    samples: list[Any]

    def update(self) -> float:
        """Do one update on all samples and return its loss."""
        from mindspeed_rl.algorithms.losses import supervised_loss
        from mindspeed_rl.building.models import batch_rules
        from mindspeed_rl.metrics.metric_set import reduce_metrics

        num_tokens = sum(sample.num_trained for sample in self.samples)
        batches = self.policy.prepare(batch_rules(self.job).pack_own(self.samples))
        found = self.policy.forward_backward(
            batches, lambda inputs: supervised_loss(inputs, num_tokens)
        )
        stats = self.policy.step()
        loss = reduce_metrics(found)["loss"]
        if not (math.isfinite(loss) and math.isfinite(stats.grad_norm) and stats.grad_norm > 0):
            raise StageFailed(f"an update has loss {loss} and gradient norm {stats.grad_norm}")
        return loss

    def timed(self, work: Callable[[], object]) -> float:
        """Return the seconds of some work, with the wait for the device."""
        platform = self.job.platform
        platform.synchronize()
        begin = time.perf_counter()
        work()
        platform.wait_for_copies()
        platform.synchronize()
        return time.perf_counter() - begin

    def used_mib(self) -> float:
        """Return the memory of the device in use now beyond what was before this process."""
        self.job.platform.release_cached_memory()
        memory = self.job.platform.memory()
        return (memory.used_bytes - self.job.platform.taken_bytes) / MIB

    def weights_digest(self) -> list[list[int]]:
        """Return numbers that differ where a bit of a weight does."""
        from mindspeed_rl.core.boxes import Box
        from mindspeed_rl.proof.checksums import box_checksum

        weights = [p.detach() for p in self.policy.named_parameters().values()]
        shapes = [tuple(weight.shape) for weight in weights]
        return [
            box_checksum(weight, Box.whole(shape), shape, weight.dtype).tolist()
            for weight, shape in zip(weights, shapes, strict=True)
        ]


def build(setting: Setting) -> DeviceWork:
    """Start the rank and build the policy with random weights."""
    job = ranks.start(setting)
    import torch

    from mindspeed_rl.building import models as build_models
    from mindspeed_rl.core.types import TrainSample

    build_models.initialize_parallel(job)
    policy = build_models.build_engine(job, "policy", UPDATES)
    generator = torch.Generator().manual_seed(4)
    size, vocabulary = setting.size, job.plan.spec.vocab_size
    ids = torch.randint(0, vocabulary, (size.sequences, size.length), generator=generator)
    return DeviceWork(job, policy, [TrainSample(i, row, size.prompt) for i, row in enumerate(ids)])


def trainer_job(setting: Setting, recorder: Recorder) -> None:
    """Run the stages trainer and offload."""
    with recorder.stage("trainer") as notes:
        built = build(setting)
        _updates(built, notes)
    with recorder.stage("offload") as notes:
        _offload(built, notes)


def _updates(built: DeviceWork, notes: Notes) -> None:
    from mindspeed_rl.metrics.throughput import devices_of, utilisation
    from mindspeed_rl.models.flops import training_flops
    from mindspeed_rl.models.tensors import num_parameters

    job, losses, seconds = built.job, [], []
    for _ in range(UPDATES):
        seconds.append(built.timed(lambda: losses.append(built.update())))
    if not losses[-1] < losses[0]:
        raise StageFailed(f"{UPDATES} updates on the same tokens: losses {losses} do not fall")
    lengths = [sample.length for sample in built.samples]
    median = statistics.median(seconds[1:])
    flops = training_flops(job.plan.spec, lengths)
    devices = devices_of(job.config, 1, job.platform.device_name)
    rates = utilisation("", flops, median, devices)
    notes.figures |= {
        "first_update_s": seconds[0],
        "update_s": median,
        "tokens_per_s": sum(lengths) / median,
        "tflops": rates["throughput/tflops_per_device"],
    }
    if "throughput/mfu" in rates:
        notes.figures["mfu"] = rates["throughput/mfu"]
    notes.figures["peak_mib"] = job.platform.peak_memory() / MIB
    millions = num_parameters(job.plan.spec) / 1e6
    notes.text = f"{millions:.1f} M weights, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def _offload(built: DeviceWork, notes: Notes) -> None:
    """Move everything twice: the first time allocates the memory of the host."""
    from mindspeed_rl.building.engine import share_memory
    from mindspeed_rl.building.models import Models
    from mindspeed_rl.core.memory import MemoryOwner

    groups = share_memory(built.job, Models(built.policy)).groups
    before, digest = built.used_mib(), built.weights_digest()
    sizes = {owner: group.num_bytes() for owner, group in groups.items()}
    copied = sum(size for owner, size in sizes.items() if owner != MemoryOwner.GRAD_BUFFERS)

    def away() -> None:
        for group in groups.values():
            group.release()

    def back() -> None:
        for group in groups.values():
            group.restore()

    away()
    back()
    out_s = built.timed(away)
    left = built.used_mib()
    in_s = built.timed(back)
    if built.weights_digest() != digest:
        raise StageFailed("the weights that came back are not those that left")
    notes.figures |= {
        "moved_mib": copied / MIB,
        "off_gb_per_s": copied / out_s / 1e9,
        "on_gb_per_s": copied / in_s / 1e9,
        "before_mib": before,
        "left_mib": left,
    }
    if not built.job.platform.shares_host_memory and before - left < 0.9 * copied / MIB:
        raise StageFailed(
            f"offloading {copied / MIB:.0f} MiB freed {before - left:.0f} MiB of the device"
        )


def engine_job(setting: Setting, recorder: Recorder) -> None:
    """Run the stages engine, sync, pauses and logprobs."""
    with recorder.stage("engine") as notes:
        built = build(setting)
        built.update()  # creates the moments
        sharing, engine = _engine(built, notes)
    from mindspeed_rl.colocation.scheduler import DeviceScheduler

    phases = DeviceScheduler(engine, lambda _: nullcontext(), sharing)
    with recorder.stage("sync") as notes:
        _sync(built, engine, phases, notes)
    with recorder.stage("pauses") as notes:
        _pauses(setting, built, engine, notes)
    with recorder.stage("logprobs") as notes:
        _logprobs(setting, built, engine, phases, notes)


def _engine(built: DeviceWork, notes: Notes) -> tuple[ColocationPlan, InferenceEngine]:
    from mindspeed_rl.building import engine as build_engine
    from mindspeed_rl.building.models import Models

    job = built.job = build_engine.with_installed_engine(built.job)
    sharing = build_engine.share_memory(job, Models(built.policy))
    sharing.leave_all()
    before = built.used_mib()
    begin = time.perf_counter()
    engine = build_engine.build_rollout_engine(job)
    notes.figures["start_s"] = time.perf_counter() - begin
    awake = built.used_mib()

    def sleep() -> None:
        engine.free_cache()
        engine.free_weights()

    def wake() -> None:
        engine.wake_weights()
        engine.wake_cache()

    notes.figures["sleep_s"] = built.timed(sleep)
    asleep = built.used_mib()
    notes.figures["wake_s"] = built.timed(wake)
    held = (engine.weight_bytes + engine.cache_bytes) / MIB
    notes.figures |= {
        "weights_and_cache_mib": held,
        "awake_mib": awake - before,
        "left_asleep_mib": asleep - before,
    }
    if not job.platform.shares_host_memory and awake - asleep < 0.9 * held:
        raise StageFailed(f"sleep freed {awake - asleep:.0f} MiB of {held:.0f} MiB")
    return sharing, engine


def _sync(
    built: DeviceWork, engine: InferenceEngine, phases: DeviceScheduler, notes: Notes
) -> None:
    from mindspeed_rl.building.engine import build_weight_sync

    sync: WeightSync = build_weight_sync(built.job, built.policy)
    notes.figures["to_train_s"] = built.timed(phases.to_train)
    notes.figures["to_sync_s"] = built.timed(phases.to_sync)
    notes.figures["first_with_proof_s"] = built.timed(lambda: sync.run(engine, 1))
    again = built.timed(lambda: sync.run(engine, 2))
    notes.figures |= {"again_s": again, "moved_gb_per_s": engine.weight_bytes / again / 1e9}
    notes.figures["to_rollout_s"] = built.timed(phases.to_rollout)


def _pauses(setting: Setting, built: DeviceWork, engine: InferenceEngine, notes: Notes) -> None:
    """Sample each response in parts, between which it keeps its cache, then read it at once.

    Log-probs of tokens behind a pause follow from what was kept; those of one pass over the whole
    sequence do not. Where the engine cannot pause, each part reads the ones before it again.
    """
    from mindspeed_rl.engines.vllm.capabilities import can_pause
    from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings
    from mindspeed_rl.rollout.stats import StepStats

    limit, parts = setting.size.response - 1, 4  # vLLM reads a sequence if one more token fits
    wanted, stats = SamplingSettings(1.0, limit, ()), StepStats()
    prompts = [tuple(sample.token_ids[: setting.size.prompt].tolist()) for sample in built.samples]
    done: dict[int, Any] = {}
    engine.stats = stats
    for part in range(1, parts + 1):
        most = limit * part // parts
        requests = [
            GenerationRequest(i, ids, 300 + 100 * part + i, most, later_tokens=limit - most)
            if part == 1
            else GenerationRequest(
                i, ids, 300 + 100 * part + i, most, done[i].token_ids, done[i].logprobs,
                later_tokens=limit - most,
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        done = dict(engine.generate(requests, wanted, 2))
    whole = [(*ids, *done[i].token_ids) for i, ids in enumerate(prompts)]
    differences = [
        abs(mine - theirs)
        for i, scores in enumerate(engine.score(whole, 1.0, False, 2))
        for mine, (theirs, _) in zip(done[i].logprobs, scores[-limit:], strict=True)
    ]
    mean = statistics.fmean(differences)
    notes.figures |= {
        "resumed": float(stats.resumed),
        "kept_tokens": float(stats.kept_cached_tokens),
        "mean_difference": mean,
        "largest_difference": max(differences),
    }
    if can_pause(setting.platform) and stats.resumed != (parts - 1) * len(prompts):
        raise StageFailed(f"{stats.resumed} of {(parts - 1) * len(prompts)} pauses went on")
    _check_mean(setting, mean, "log-probs of parts and of one pass over the response")


def _check_mean(setting: Setting, mean: float, what: str) -> None:
    limit = HALF_LIMIT if setting.half else FULL_LIMIT
    if not mean <= limit:
        raise StageFailed(f"{what} differ by {mean:.3g} on average; {limit} is fine")


def _logprobs(
    setting: Setting,
    built: DeviceWork,
    engine: InferenceEngine,
    phases: DeviceScheduler,
    notes: Notes,
) -> None:
    """Sample with the engine, then ask the trainer for the same tokens."""
    import torch

    from mindspeed_rl.building.models import batch_rules
    from mindspeed_rl.core.types import TrainSample
    from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings

    prompts = [tuple(sample.token_ids[: setting.size.prompt].tolist()) for sample in built.samples]
    requests = [GenerationRequest(i, ids, seed=100 + i) for i, ids in enumerate(prompts)]
    wanted = SamplingSettings(1.0, setting.size.response, ())
    done: dict[int, Any] = {}
    seconds = built.timed(lambda: done.update(engine.generate(requests, wanted, 2)))
    phases.to_train()
    samples = [
        TrainSample(i, torch.tensor([*ids, *done[i].token_ids]), len(ids))
        for i, ids in enumerate(prompts)
    ]
    policy = built.policy
    batches = policy.prepare(batch_rules(built.job).pack_own(samples))
    differences = []
    for batch, found in zip(batches, policy.logprobs(batches), strict=True):
        assert found is not None
        owners = [batch.sample_ids[i] for i in batch.sequence_of.tolist()]
        places = (batch.positions[batch.trained] + 1).tolist()
        theirs = [
            done[owner].logprobs[place - len(prompts[owner])]
            for owner, place in zip(owners, places, strict=True)
        ]
        differences.append((found.float().cpu() - torch.tensor(theirs)).abs())
    difference = torch.cat(differences)
    assert difference.numel() == len(requests) * setting.size.response
    mean, most = float(difference.mean()), float(difference.max())
    notes.figures |= {
        "sampled_tokens_per_s": difference.numel() / seconds,
        "mean_difference": mean,
        "largest_difference": most,
    }
    _check_mean(setting, mean, "log-probs of engine and trainer")
