"""Worlds of real gloo ranks with a trainer and a vLLM engine in the same processes.

Each check of :func:`engine_world` is a function that returns plain facts; the tests judge them.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from support.handover import hand_over
from support.training_worlds import make_job, unshimmed_modules

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.types import Completion, TrainSample
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.job import Job
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.platforms.storages import as_bytes
from mindspeed_rl.rollout.draft_history import DraftHistory
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, request_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mindspeed_rl.colocation.scheduler import DeviceScheduler
    from mindspeed_rl.engines.vllm.engine import VllmEngine
    from mindspeed_rl.trainer.train_engine import TrainEngine
    from mindspeed_rl.weights.sync import WeightSync

BLOCK_TOKENS = 32
KV_BYTES = 256 << 20
TEMPERATURE = 0.6
NUM_REQUESTS = 24
SAMPLED = SamplingSettings(TEMPERATURE, max_response_tokens=12, stop_token_ids=(1,))
GREEDY = SamplingSettings(0.0, max_response_tokens=4, stop_token_ids=(1,))
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SyncFacts:
    """One weight update and a greedy generation after it.

    Attributes:
        trainer: largest |log p(engine) - log p(trainer)| on the engine's tokens, in nats.
        transformers: the same against an export of the weights, loaded afresh; rank 0 only.
        greedy_gap: how far a greedy token is from the best one of that checkpoint; rank 0 only.
        change: largest change of the log-probs of the same tokens by the update.
    """

    trainer: float
    transformers: float
    greedy_gap: float
    change: float


@dataclass(slots=True)
class EngineFacts:
    """What one rank saw; see the functions that fill it."""

    changed_by_build: list[str] = field(default_factory=list)
    changed_by_generate: list[str] = field(default_factory=list)
    unshimmed_modules: list[str] = field(default_factory=list)
    cuda_available: bool = True
    refusals: dict[str, str] = field(default_factory=dict)
    disagreement: str = ""
    samples: list[Completion] = field(default_factory=list)
    other_batches: list[Completion] = field(default_factory=list)
    sampled_mismatch: float = float("inf")
    syncs: list[SyncFacts] = field(default_factory=list)
    cached_prefix: dict[str, float] = field(default_factory=dict)
    freed_bytes: list[int] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)
    nonce: str = ""
    groups_stay: bool = False


@dataclass
class Both:
    """Trainer and engine of this rank."""

    job: Job[RLRunConfig, RLPlan]
    policy: TrainEngine
    engine: VllmEngine
    phases: DeviceScheduler
    sync: WeightSync

    def to_rollout(self, version: int) -> None:
        """Weights into the engine, and the devices to it. Collective: the world."""
        hand_over(self.phases, self.sync, self.engine, version)


def engine_world(
    world: World, model: str, trainer_tp: int, engine_tp: int, work_dir: str
) -> EngineFacts:
    """Rank function: every check, in an order in which each leaves the engine awake."""

    from mindspeed_rl.building.models import build_engine, initialize_parallel

    facts = EngineFacts()
    job = engine_job(world, model, trainer_tp, engine_tp)
    initialize_parallel(job)
    policy = build_engine(job, "policy", 1, TEMPERATURE)
    with noted_changes(facts.changed_by_build):
        both = build_both(job, policy)
    facts.refusals["asleep"] = refusal(both, version=0)
    both.to_rollout(0)
    check_sampling(both, facts)
    facts.refusals["other version"] = refusal(both, version=1)
    facts.disagreement = disagreement(both)
    check_prefix_cache(both, facts)
    facts.syncs = [sync_and_compare(both, version, work_dir) for version in (11, 12, 13)]
    for _ in range(2):
        for storage, _ in both.engine._cache._storages:
            as_bytes(storage).fill_(1)  # pages that nobody touches are not there to be freed
        before = psutil.Process().memory_info().rss
        both.phases.to_train()
        facts.freed_bytes.append(before - psutil.Process().memory_info().rss)
        both.to_rollout(13)
    both.engine.begin_update()
    facts.refusals["update begun"] = refusal(both, version=13)
    facts.unshimmed_modules = unshimmed_modules()
    facts.cuda_available = torch.cuda.is_available()
    facts.nonce, facts.shared_memory = shared_memory()
    del both, policy
    gc.unfreeze()  # vLLM froze what was there when its engine was built
    gc.collect()
    facts.groups_stay = dist.is_initialized()
    return facts


def killed_world(world: World, model: str, work_dir: str) -> None:
    """Rank function: build an engine of all ranks, say its nonce, die of SIGKILL."""
    from mindspeed_rl.building.models import build_engine, initialize_parallel

    job = engine_job(world, model, 1, world.size)
    initialize_parallel(job)
    both = build_both(job, build_engine(job, "policy", 1, TEMPERATURE))
    both.to_rollout(0)
    tokens = sum(
        len(c.token_ids) for c in both.engine.generate(requests()[:4], SAMPLED, 0).values()
    )
    nonce, _ = shared_memory()
    (Path(work_dir) / f"killed-{world.rank}").write_text(f"{nonce} {tokens}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def engine_job(world: World, model: str, trainer_tp: int, engine_tp: int) -> Job[Any, RLPlan]:
    """A job with sampling temperature 0.6, small cache blocks and a 256 MiB cache."""
    flags = ["--tensor-model-parallel-size", str(trainer_tp), "--rollout-tp", str(engine_tp)]
    flags += ["--micro-batch-size", "8", "--rl-default-temperature", str(TEMPERATURE)]
    flags += ["--rollout-kv-cache-gb", str(KV_BYTES / 2**30)]
    flags += ["--vllm-block-size", str(BLOCK_TOKENS), "--vllm-max-num-seqs", "32"]
    return make_job(world, model, flags)


def build_both(job: Job[Any, RLPlan], policy: TrainEngine) -> Both:
    """The engine and the state machine, by the functions of the entry."""
    from mindspeed_rl.building.engine import build_rollout_engine, build_weight_sync, share_memory
    from mindspeed_rl.building.models import Models
    from mindspeed_rl.colocation.scheduler import DeviceScheduler

    sharing = share_memory(job, Models(policy))
    sharing.leave_all()
    engine = build_rollout_engine(job)
    phases = DeviceScheduler(engine, lambda _: nullcontext(), sharing)
    phases.to_train()
    return Both(job, policy, engine, phases, build_weight_sync(job, policy))


def loaded_engine(
    world: World, model: str, flags: Sequence[str], history: DraftHistory | None = None
) -> tuple[Job[Any, RLPlan], VllmEngine]:
    """An engine without a trainer, with the weights of a checkpoint as version 0.

    It drafts from ``history`` if there is one.
    """
    from mindspeed_rl.building.engine import build_rollout_engine, with_installed_engine
    from mindspeed_rl.building.models import load_weights

    job = with_installed_engine(make_job(world, model, flags))
    engine = build_rollout_engine(job, history)
    engine.begin_update()
    load_weights(job, job.plan.rollout_layout, engine.weight_views())
    engine.finish_update(0)
    return job, engine


def requests() -> list[GenerationRequest]:
    """Ragged prompts, each with the seed of its sample."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for i in range(NUM_REQUESTS):
        ids = torch.randint(5, 307, (2 + 3 * (i % 7),), generator=generator).tolist()
        result.append(GenerationRequest(i, tuple(ids), request_seed(0, 1, i)))
    return result


def check_sampling(both: Both, facts: EngineFacts) -> None:
    """Sample in two ways: a third on the first engine, and one by one in reverse."""
    engine, replica = both.engine, both.job.plan.engine.replica_of(both.job.world.rank)
    everything = requests()
    cut = NUM_REQUESTS // 3 if both.job.plan.engine.num_replicas > 1 else NUM_REQUESTS
    mine = everything[:cut] if replica == 0 else everything[cut:]
    with noted_changes(facts.changed_by_generate):
        completions = engine.generate(mine, SAMPLED, 0)
    union = {i: c for part in gather_objects(completions) for i, c in part.items()}
    facts.samples = [union[i] for i in range(NUM_REQUESTS)]
    singles = [engine.generate([r], SAMPLED, 0)[r.sample_id] for r in reversed(everything)]
    facts.other_batches = singles[::-1]
    facts.sampled_mismatch = mismatch(both, everything, facts.samples)


def disagreement(both: Both) -> str:
    """The error of this rank when the second rank of its engine has another prompt."""
    plan, rank = both.job.plan.engine, both.job.world.rank
    if plan.tp == 1:
        return ""
    mine = requests()[:3]
    if plan.tp_rank(rank) == 1:
        mine[1] = replace(mine[1], token_ids=(*mine[1].token_ids[:-1], 9))
    return refusal(both, 0, mine)


def refusal(both: Both, version: int, asked: Sequence[GenerationRequest] = ()) -> str:
    """The error of generating for a trainer of ``version``."""
    try:
        both.engine.generate(asked or requests()[:1], SAMPLED, version)
    except RuntimeError as error:
        return str(error)
    return "no error"


def check_prefix_cache(both: Both, facts: EngineFacts) -> None:
    """Log-prob error on a prompt of three blocks whose keys and values are in the cache.

    Weights change twice without a sleep in between: once the cache is left alone by
    ``finish_update``, as a negative control, and once it does its work.
    """
    engine = both.engine
    ids = torch.randint(5, 307, (3 * BLOCK_TOKENS + 2,), generator=torch.Generator().manual_seed(3))
    long = [GenerationRequest(0, tuple(ids.tolist()), 0)]
    engine.generate(long, GREEDY, 0)
    reset = engine._reset_prefix_cache
    for name, version in (("kept", 1), ("reset", 2)):
        scale_weights(both, 1.1)
        engine.begin_update()
        both.sync._path.move(both.policy.named_parameters(), engine)
        if name == "kept":
            engine._reset_prefix_cache = lambda: None  # type: ignore[method-assign]
        engine.finish_update(version)
        engine._reset_prefix_cache = reset  # type: ignore[method-assign]
        completions = list(engine.generate(long, GREEDY, version).values())
        facts.cached_prefix[name] = mismatch(both, long, completions, temperature=1.0)


def sync_and_compare(both: Both, version: int, work_dir: str) -> SyncFacts:
    """Change the weights, hand over, generate greedily, compare. Collective: the world."""
    from mindspeed_rl.rl.export import export_policy

    probe = requests()[:6]
    old = list(both.engine.generate(probe, GREEDY, both.engine.weights_version).values())
    before = torch.cat(trainer_logprobs(both, probe, old, 1.0))
    both.phases.to_train()
    scale_weights(both, 1.05)
    after = torch.cat(trainer_logprobs(both, probe, old, 1.0))
    both.to_rollout(version)
    completions = list(both.engine.generate(probe, GREEDY, version).values())
    target = Path(work_dir) / f"export-{version}"
    export_policy(both.job, both.policy, str(target), 1)
    fresh = gap = 0.0
    if both.job.world.rank == 0:
        expected, gap = transformers_logprobs(target, probe, completions)
        found = torch.cat([torch.tensor(c.logprobs) for c in completions])
        fresh = float((torch.cat(expected) - found).abs().max())
    return SyncFacts(
        mismatch(both, probe, completions, temperature=1.0),
        fresh,
        gap,
        float((after - before).abs().max()),
    )


def scale_weights(both: Both, factor: float) -> None:
    """An update of the trainer that every layout makes alike."""
    with torch.no_grad():
        for parameter in both.policy.named_parameters().values():
            parameter *= factor


def mismatch(
    both: Both,
    asked: Sequence[GenerationRequest],
    completions: Sequence[Completion],
    temperature: float = TEMPERATURE,
) -> float:
    """Largest |log p(trainer) - log p(engine)| over all tokens. Collective: the world."""
    expected = trainer_logprobs(both, asked, completions, temperature)
    pairs = zip(expected, completions, strict=True)
    return max(float((p - torch.tensor(c.logprobs)).abs().max()) for p, c in pairs)


def trainer_logprobs(
    both: Both,
    asked: Sequence[GenerationRequest],
    completions: Sequence[Completion],
    temperature: float,
) -> list[torch.Tensor]:
    """Log-probs of the trainer at ``temperature``, per request. Collective: the world."""
    from support.batches import local_batches

    from mindspeed_rl.trainer.heads import LogProbHead

    samples = [
        TrainSample(
            i,
            torch.tensor([*r.token_ids, *c.token_ids]),
            len(r.token_ids),
            {"rollout_logprobs": torch.tensor(c.logprobs)},
        )
        for i, (r, c) in enumerate(zip(asked, completions, strict=True))
    ]
    batches = local_batches(both.job, both.policy, samples)
    head = both.policy.head
    assert isinstance(head, LogProbHead)
    kept, head.temperature = head.temperature, temperature
    tensors = both.policy.logprobs(batches)
    head.temperature = kept
    mine = {
        sample_id: tensor[b.sequence_of == i]
        for b, tensor in zip(batches, tensors, strict=True)
        if tensor is not None
        for i, sample_id in enumerate(b.sample_ids)
    }
    union = {i: t for part in gather_objects(mine) for i, t in part.items()}
    return [union[i] for i in range(len(samples))]


def transformers_logprobs(
    folder: Path, asked: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> tuple[list[torch.Tensor], float]:
    """Log-probs of a checkpoint loaded afresh, and how far the tokens are from its best. Local."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    result, gap = [], 0.0
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([*request.token_ids, *completion.token_ids])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(request.token_ids) - 1 : -1].log_softmax(-1)
        picked = rows.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gap = max(gap, float((rows.amax(-1) - picked).max()))
        result.append(picked)
    return result, gap


@contextmanager
def noted_changes(changes: list[str]) -> Iterator[None]:
    """Note which process-wide states another piece of code leaves changed."""
    before = _process_state()
    yield
    after = _process_state()
    changes += [name for name in sorted(before | after) if before.get(name) != after.get(name)]


def _process_state() -> dict[str, object]:
    environment = {
        f"environment {name}": value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_")  # the engine reads its own variables later
    }
    kind, keys, *position = np.random.get_state(legacy=True)
    return environment | {
        "python generator": random.getstate(),
        "numpy generator": (kind, np.asarray(keys).tobytes(), tuple(position)),
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "world size": dist.get_world_size(),
    }


def shared_memory() -> tuple[str, list[str]]:
    """This job's nonce, and the segments under its name that still have one."""
    from mindspeed_rl.vllm_patches import shared_memory_names

    (nonce,) = shared_memory_names._KEYS
    return nonce, segments_of(nonce)


def segments_of(nonce: str) -> list[str]:
    """Names in /dev/shm that hold a nonce, of what the ranks of an engine sum in."""
    return [path.name for path in SHARED_MEMORY.iterdir() if f"{nonce}-sums-" in path.name]
