"""A training step, a reshard and its proof on emulated NPUs, for the record of their operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from ascend import engine_worlds
from ascend.emulator.census import Call, counting
from ascend.worlds import ROUTER_BIAS, SMALL
from support.training_worlds import Case, make_job, make_samples, run_case

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.launch.bootstrap import World

BUCKET_BYTES = 24 << 10


def train_and_prove(
    world: World, models: Mapping[str, str], vocab_size: int, flags: Sequence[str]
) -> tuple[dict[str, list[str]], set[Call]]:
    """HF tensors that differ after a step of GRPO and a reshard as vLLM-Ascend keeps weights.

    And the operators of the proof, without its exchange.
    """
    from mindspeed_rl.building.models import build_engine, initialize_parallel
    from mindspeed_rl.engines.vllm.layout import VllmLayout
    from mindspeed_rl.weights.executor import Resharder
    from mindspeed_rl.weights.transports import make_transport
    from mindspeed_rl.weights.verify import WeightVerifier

    found: dict[str, list[str]] = {}
    calls: set[Call] = set()
    for name, folder in models.items():
        job = make_job(world, folder, [*SMALL, *flags, "--bf16"])
        if not found:
            initialize_parallel(job)
        engine = build_engine(job, "policy", 1)
        run_case(job, engine, Case(name, (), "grpo", num_steps=1), make_samples(vocab_size))
        source, read = job.plan.megatron, engine.named_parameters()
        target = VllmLayout(
            source.spec, EngineLayout(world.size, world.size, 1, True), transposed_experts=True
        )
        device = next(iter(read.values())).device
        write = {
            param: torch.zeros(
                shape,
                dtype=torch.float32 if ROUTER_BIAS in param else torch.bfloat16,
                device=device,
            )
            for param, shape in target.local_shapes(world.rank).items()
        }
        resharder = Resharder(
            source,
            target,
            rank=world.rank,
            ranks_per_node=world.size,
            transport=make_transport("all-to-all", world.size, device),
            dtype=torch.bfloat16,
            bucket_bytes=BUCKET_BYTES,
        )
        resharder.run(read, write)
        proof = WeightVerifier(source, target, world.rank, torch.bfloat16)
        found[name] = proof.differing_tensors(read, write)
        with counting() as counts:
            proof.checksums(read, write)
        calls |= set(counts)
    return found, calls


def load_and_sample(world: World, folder: str, dtype: str, layout: EngineLayout) -> None:
    """A checkpoint through the engine's loaders, sleep and waking, a reshard's writes, samples."""
    engine = engine_worlds.build(folder, dtype, layout, world.rank)
    weights = engine_worlds.load(engine, folder, 1)
    engine.free_cache()
    engine.free_weights()
    engine.wake_weights()
    engine_worlds.write(engine, weights, 2)
    engine.wake_cache()
    engine_worlds.sample(engine, 2, range(len(engine_worlds.PROMPTS)))
