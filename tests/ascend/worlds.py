"""Rank functions that run on emulated NPUs and, for comparison, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.family_reshard import Moved, Rollout, family_reshard_world
from support.training_worlds import (
    Case,
    CaseResult,
    in_hf_coordinates,
    make_job,
    make_loss,
    make_samples,
    run_case,
)

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.models.spec import ModelSpec

ROUTER_BIAS = "e_score_correction_bias"
SMALL = ("--micro-batch-size", "3", "--make-vocab-size-divisible-by", "8", "--lr", "1e-3")


@dataclass(frozen=True, slots=True)
class FamilyFacts:
    """One model that was built, filled from its checkpoint, read back and trained.

    Attributes:
        names: parameters of the rank, which ``TrainEngine`` compares with the table.
        modules: classes of the modules of the last layer, by their names.
        changed: HF tensors that are not bit-identical after checkpoint -> device -> host.
        run: a forward and backward pass, and an update.
    """

    names: list[str]
    modules: dict[str, str]
    changed: list[str]
    run: CaseResult


def with_experts(samples: Sequence[TrainSample], spec: ModelSpec) -> list[TrainSample]:
    """All tokens but the first trained on, each with experts of its own in every layer."""
    if spec.moe is None:
        return list(samples)
    generator = torch.Generator().manual_seed(3)
    layers, found = len(spec.expert_layers), []
    for sample in samples:
        scores = torch.rand((sample.length - 1, layers, spec.num_experts), generator=generator)
        experts = scores.topk(spec.moe.top_k).indices.to(torch.uint8).flatten(1)
        found.append(replace(sample, num_prompt_tokens=1, columns={"experts": experts}))
    return found


def family_world(
    world: World,
    models: Mapping[str, str],
    vocab_size: int,
    flags: Sequence[str],
    given_experts: bool = False,
) -> dict[str, FamilyFacts]:
    """Every model in one layout; results are on rank 0.

    With ``given_experts`` routers take those of :func:`with_experts`, so that no rounding sends a
    token elsewhere.
    """
    from mindspeed_rl.building.models import build_engine, initialize_parallel

    facts: dict[str, FamilyFacts] = {}
    for name, folder in models.items():
        job = make_job(world, folder, [*SMALL, *flags])
        if not facts:
            initialize_parallel(job)
        routing = "engine" if given_experts and job.plan.spec.moe else "free"
        engine = build_engine(job, "policy", 1, routing=routing)
        samples = make_samples(vocab_size)
        if given_experts:
            samples = with_experts(samples, job.plan.spec)
        layer = engine.modules[0].decoder.layers[-1]
        # what was loaded: the checkpoint itself, not what the step below makes of it
        back = in_hf_coordinates(job, engine.named_parameters())
        source = load_file(Path(folder) / "model.safetensors")
        if job.config.train.bf16:
            source = {n: t if ROUTER_BIAS in n else t.bfloat16().float() for n, t in source.items()}
        changed = [n for n, t in back.items() if world.rank == 0 and not torch.equal(t, source[n])]
        case = Case(name, (), "sft", num_steps=1)
        facts[name] = FamilyFacts(
            sorted(engine.named_parameters()),
            {part: type(module).__qualname__ for part, module in layer.named_modules()},
            changed,
            run_case(job, engine, case, samples),
        )
    return facts


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """A trainer whose memory left the device between its steps.

    Attributes:
        weights: after the last step, on the host, by what left.
        owned: bytes of what left, by owner.
        freed: bytes by which the driver's free memory grew when it left.
        back: bytes of the device that are in use after it came back, less those before it left.
    """

    weights: dict[str, list[torch.Tensor]]
    owned: dict[str, int]
    freed: int
    back: int


def blocks_world(world: World) -> list[bool]:
    """Whether a tensor's address is in free memory, while it is there and after."""
    from mindspeed_rl.platforms.npu_allocator import free_blocks

    kept = torch.zeros(3000, dtype=torch.uint8, device="npu")
    passing = torch.zeros(5000, dtype=torch.uint8, device="npu")
    address, found = passing.data_ptr(), []
    found.append(any(address in block for block in free_blocks()))
    del passing
    found.append(any(address in block for block in free_blocks()))
    assert not any(kept.data_ptr() in block for block in free_blocks())
    return found


@dataclass(frozen=True)
class PinnedFacts:
    """Bytes of pinned memory that CANN has handed out for one buffer."""

    asked: int
    torch_npus: int
    held: int
    with_a_view: int
    without_views: int
    came_back: bool


def pinned_world(world: World, num_bytes: int) -> PinnedFacts:
    """A buffer of the platform, filled by a copy from the device; and one of torch_npu."""
    import ctypes

    from mindspeed_rl.platforms.registry import select_platform

    cann = ctypes.CDLL("libascendcl.so")
    cann.emulated_pinned_bytes.restype = ctypes.c_size_t
    platform = select_platform("npu")
    before = cann.emulated_pinned_bytes()

    def held() -> int:
        return int(cann.emulated_pinned_bytes()) - before

    theirs = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    torch_npus, before = held(), cann.emulated_pinned_bytes()
    buffer = platform.host_buffer(num_bytes)
    of_buffer = held()
    device = torch.arange(5, dtype=torch.uint8, device="npu")
    view = buffer[-5:]
    view.copy_(device, non_blocking=True)
    platform.synchronize()
    del buffer
    of_view, came_back = held(), view.tolist() == [0, 1, 2, 3, 4]
    del view, theirs
    return PinnedFacts(num_bytes, torch_npus, of_buffer, of_view, held(), came_back)


def leave_beside_other_work(group: Any, policy: Any) -> None:
    """Copy a group to the host late, while weights are read on the device; then free it."""
    from ascend.late_copies import late_copies

    with late_copies() as late:
        group.start_release()
        assert late.queued and group.is_onloaded
        total = sum(float(p.detach().double().sum()) for p in policy.named_parameters().values())
        assert math.isfinite(total)
        group.release()
    assert late.num_done and not group.is_onloaded


def memory_world(world: World, model: str, num_steps: int) -> MemoryFacts:
    """The same steps with everything resident, and with everything away in between.

    At last the optimizer state leaves beside other work, by copies that are done late.
    """
    from support.batches import local_batches

    from mindspeed_rl.building.models import build_engine, initialize_parallel
    from mindspeed_rl.colocation.scheduler import ColocationPlan
    from mindspeed_rl.core.memory import MemoryOwner, OffloadMode
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    facts = MemoryFacts({}, {}, 0, 0)
    for name in ("none", "all", "late"):
        mode = OffloadMode.NONE if name == "none" else OffloadMode.ALL
        job = make_job(world, model, [*SMALL, "--use-distributed-optimizer"])
        if not facts.weights:
            initialize_parallel(job)
        policy = build_engine(job, "policy", num_steps)
        reference = build_engine(job, "reference", 0)
        platform = job.platform
        sharing = ColocationPlan(
            trainer_memory(policy, reference),
            mode,
            release_cached_memory=platform.release_cached_memory,
            wait_for_copies=platform.wait_for_copies,
        )
        samples = make_samples(policy.spec.vocab_size)
        batches = local_batches(job, policy, samples)
        loss = make_loss(Case("sft", loss="sft"), samples, [])
        owned: dict[str, int] = {}
        freed = back = 0
        for _ in range(num_steps):
            policy.forward_backward(batches, loss)
            policy.step()
            reference.logprobs(batches)
            policy.release_step_state()
            platform.release_cached_memory()
            before = platform.memory()
            owned = {owner.value: g.num_bytes() for owner, g in sharing.groups.items()}
            if name == "late":
                leave_beside_other_work(sharing.groups[MemoryOwner.OPTIMIZER], policy)
            sharing.leave_all()
            platform.release_cached_memory()
            freed = platform.memory().free_bytes - before.free_bytes
            for group in sharing.groups.values():
                group.restore()
            platform.synchronize()
            back = before.free_bytes - platform.memory().free_bytes
        weights = [p.detach().cpu() for p in policy.named_parameters().values()]
        facts = MemoryFacts(facts.weights | {name: weights}, owned, freed, back)
    return facts


def profile_world(world: World, model: str, flags: Sequence[str], num_steps: int) -> str:
    """Steps of a trainer with the flags of its profiler, in a process whose children are spawned.

    How they are started afterwards.
    """
    import multiprocessing

    from support.batches import local_batches

    from mindspeed_rl.building.models import build_engine, initialize_parallel
    from mindspeed_rl.metrics.profiler import StepProfiler
    from mindspeed_rl.metrics.timers import PhaseTimer

    job = make_job(world, model, [*SMALL, *flags])
    initialize_parallel(job)
    policy = build_engine(job, "policy", num_steps)
    samples = make_samples(policy.spec.vocab_size)[:2]
    batches = local_batches(job, policy, samples)
    loss = make_loss(Case("sft", loss="sft"), samples, [])
    multiprocessing.set_start_method("spawn", force=True)
    profiler = StepProfiler(job.config.profiler, job.platform, world.rank, "unused")
    timer = PhaseTimer(job.platform, mark=profiler.phase)
    for step in range(1, num_steps + 1):
        profiler.begin_step(step)
        with timer(f"step {step}"):
            policy.forward_backward(batches, loss)
            policy.step()
    profiler.close()
    return multiprocessing.get_start_method()


def movement_world(
    world: World,
    models: Mapping[str, str],
    flags: Sequence[str],
    rollouts: Sequence[Rollout],
    num_samples: int,
) -> tuple[dict[str, list[Moved]], list[tuple[object, ...]]]:
    """Weights from trainers to engine layouts, then samples from engines to trainers."""
    return family_reshard_world(world, models, flags, rollouts), exchange(world, num_samples)


def exchange(world: World, num_samples: int) -> list[tuple[object, ...]]:
    """Ragged rollouts of every rank on its device; each goes to the next rank and is read there."""
    import torch

    from mindspeed_rl.core.layout import ParallelLayout
    from mindspeed_rl.core.stages import even_stages
    from mindspeed_rl.core.types import Completion, Prompt
    from mindspeed_rl.core.types import Rollout as Finished
    from mindspeed_rl.samples.columns import experts_column, response_columns
    from mindspeed_rl.samples.device_cache import TensorCache
    from mindspeed_rl.samples.exchange import OwnerRanks, Redistribution, plan_hops
    from mindspeed_rl.samples.rollout_info import SampleKey, exchange_table
    from mindspeed_rl.samples.store import keep_rollouts, responses_in

    mine = []
    for i in range(world.rank, num_samples, world.size):
        tokens = tuple(range(2**30, 2**30 + i))
        mask = tuple(n % 2 == 0 for n in range(i))
        experts = bytes(251 - 7 * i - n for n in range(3 * i))
        done = Completion(tokens, tuple(-0.25 * n for n in range(i)), "stop", 3, mask, experts)
        prompt = Prompt(7 * i, (1, 2), "text", "answer")
        mine.append(Finished(i, prompt, done, 0.5 * i, {"math": 1.0}))
    # experts of every token; messages are of 32-bit words
    columns = response_columns(has_environment=True, experts=experts_column(256, 3))
    table = exchange_table(
        mine, world.rank, ("math",), num_samples, SampleKey(1, 0), columns=columns
    )
    cache = TensorCache(torch.device("npu", torch.npu.current_device()))
    cache.begin_step(1)
    keep_rollouts(cache, columns, mine, table)
    wanted = [(s.group + 1) % world.size for s in table]
    layout = ParallelLayout.build(world=world.size, stages=even_stages(1))
    hops = plan_hops(OwnerRanks([s.group for s in table]), wanted, layout, (0,), world.rank)
    moved = Redistribution(cache, table, columns, hops)
    moved.run(lambda axis: None)
    moved.keep()
    found = []
    items = [i for i, rank in enumerate(wanted) if rank == world.rank]
    here = [table[i] for i in items]
    for s, r in zip(here, responses_in(moved, items, here, columns), strict=True):
        # Rows are indexed on the host, so the mask of trained tokens is there.
        assert {name for name, x in r.items() if x.device.type != "npu"} == {"loss_mask"}
        assert r["loss_mask"].tolist() == [n % 2 == 0 for n in range(s.num_tokens)]
        ids, logprobs = r["token_ids"].tolist(), r["rollout_logprobs"].tolist()
        chosen = bytes(r["experts"].flatten().tolist())
        found.append((s.sample_id, s.prompt_index, ids, logprobs, s.reward, s.parts, chosen))
    return found
