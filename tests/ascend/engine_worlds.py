"""What ranks do with vLLM-Ascend's real engine: bodies of tests, on emulated NPUs."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ascend.emulator import process

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.platforms.process_state import preserved_environment
from mindspeed_rl.platforms.registry import select_platform
from mindspeed_rl.rollout.draft_costs import DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings

GIB = 2**30
# Of the 61 GiB of a device; the engine is built beside it.
TRAINER_SHARE = 0.6


def trainer_memory() -> list[torch.Tensor]:
    """Memory that the trainer holds while the engine is built; pages are never touched."""
    total = torch.npu.mem_get_info()[1]
    piece = 2 * GIB
    count = int(total * TRAINER_SHARE) // piece
    return [torch.empty(piece, dtype=torch.uint8, device="npu") for _ in range(count)]


def build(
    folder: str, dtype: str, layout: EngineLayout, rank: int, max_num_batched_tokens: int = 256,
    records: bool = False, history: DraftHistory | None = None, counts: bool = False,
) -> Any:  # fmt: skip
    """The engine of this rank, as the product builds it; with ``records`` it tells its experts.

    With a ``history`` it drafts; if it ``counts`` the tokens of experts, these may move.
    """
    with preserved_environment():  # as when the product imports vLLM
        process.before_vllm()
        process.before_engine()
    spec = spec_from_hf_config(json.loads((Path(folder) / "config.json").read_text()))
    provider = engine_provider()
    settings = EngineSettings(
        model_dir=folder,
        layout=provider.installed_layout(
            provider.layout(spec, layout, EngineTuningConfig()), {}, "npu"
        ),
        rank=rank,
        dtype=dtype,
        max_model_len=64,
        kv_cache_bytes=32 * 2**20,
        seed=1,
        options={
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": min(16, max_num_batched_tokens),
        },
        tuning=EngineTuningConfig(rollout_graph_mode="eager"),  # only a device captures graphs
        recorded_layers=tuple(spec.expert_layers) if records else (),
        counted_layers=tuple(spec.expert_layers) if counts else (),
        draft_rule=None if history is None else DraftRule(period=1),
        draft_history=history,
    )  # fmt: skip
    return provider.build(settings, select_platform("npu"))


Sampled = Mapping[int, tuple[Sequence[int], Sequence[float]]]
PROMPTS = ((5, 9, 11), (20, 21, 22, 23, 24, 25, 26), (40,), (33, 7, 12, 60, 3, 8))
SETTINGS = SamplingSettings(temperature=0.7, max_response_tokens=16, stop_token_ids=())


def load(engine: Any, folder: str, version: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint through the engine's loaders; what its parameters are then."""
    from safetensors.torch import load_file

    engine.begin_update()
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        engine.load_tensor(name, value.to("npu"))
    engine.finish_update(version)
    return {name: view.cpu() for name, view in engine.weight_views().items()}


def write(engine: Any, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Write parameters as a reshard does, each into its place."""
    engine.begin_update()
    for name, view in engine.weight_views().items():
        view.copy_(weights[name])
    engine.finish_update(version)


def sample(engine: Any, version: int, mine: Sequence[int], first: int = 0) -> Sampled:
    """Tokens and log-probs of some of the prompts, every one with a seed of its own."""
    asked = [GenerationRequest(first + i, PROMPTS[i], 100 + i) for i in mine]
    done = engine.generate(asked, SETTINGS, version)
    return {i - first: (c.token_ids, c.logprobs) for i, c in done.items()}


def process_functions() -> dict[tuple[str, str], object]:
    """What a process shares: functions of torch and Python by owner and name."""
    owners = {
        "torch": torch, "torch.cuda": torch.cuda, "torch.npu": torch.npu,
        "torch.jit": torch.jit, "torch.distributed": torch.distributed,
        "torch.accelerator": torch.accelerator, "torch.Tensor": torch.Tensor,
        "torch.nn.Module": torch.nn.Module, "torch.nn.functional": torch.nn.functional,
        "builtins": builtins,
    }  # fmt: skip
    return {(o, n): value for o, owner in owners.items() for n, value in vars(owner).items()}


def replaced(
    before: Mapping[tuple[str, str], object], after: Mapping[tuple[str, str], object]
) -> dict[str, tuple[str, str]]:
    """What is another object now: what it was and is, by owner and name."""
    return {
        ".".join(place): (str(value), str(after.get(place)))
        for place, value in before.items()
        if after.get(place) is not value
    }


def private_formats() -> str:
    """Whether torch_npu may create tensors in private memory formats."""
    import torch_npu

    return str(torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT").decode())


def whole_life(
    world: World, folders: Sequence[str], dtype: str, layout: EngineLayout
) -> dict[str, Any]:
    """Build beside a trainer, load, sample, sleep, wake, write others, sample again.

    The last of several ranks has one prompt, the first has the others.
    """
    mine = range(len(PROMPTS))
    if world.size > 1:
        mine = mine[-1:] if world.rank else mine[:-1]
    before, variables = process_functions(), dict(os.environ)
    formats = private_formats()
    held = trainer_memory()
    engine = build(folders[0], dtype, layout, world.rank)
    after = process_functions()
    found: dict[str, Any] = {
        "replaced": replaced(before, after),
        "variables": {
            n: (variables.get(n), os.environ.get(n))
            for n in variables.keys() | os.environ.keys()
            if variables.get(n) != os.environ.get(n)
        },
        "formats": (formats, private_formats()),
        "operators": variables.get("ASCEND_CUSTOM_OPP_PATH", ""),
        "format": engine.weight_format,
        "trainer_bytes": sum(block.numel() for block in held),
    }
    other = load(engine, folders[1], 1)
    load(engine, folders[0], 2)
    found["sampled"] = [sample(engine, 2, mine), sample(engine, 2, mine, first=10)]
    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    engine.free_cache()
    engine.free_weights()
    found["freed"] = torch.npu.mem_get_info()[0] - free
    found["owned"] = engine.weight_bytes + engine.cache_bytes
    found["saved"] = engine._weights.saved_bytes
    del held
    engine.wake_weights()
    write(engine, other, 3)
    engine.wake_cache()
    views = engine.weight_views()
    found["different"] = [n for n, value in other.items() if not torch.equal(views[n].cpu(), value)]
    found["other"] = sample(engine, 3, mine)
    found["steps"] = engine.stats
    last = mine[-1]
    found["scored"] = engine.score([[*PROMPTS[last], *found["other"][last][0]]], 1.0, False, 3)
    return found


Routes = Mapping[int, tuple[Sequence[int], bytes]]


def recorded_life(world: World, folder: str) -> list[Routes]:
    """Sample with the experts of every token, before and after the cache has left.

    Prompts are read in parts of at most 4 tokens, beside others that are decoded.
    """
    mine = range(len(PROMPTS))
    engine = build(folder, "float32", EngineLayout(1, 1), world.rank, 4, records=True)
    load(engine, folder, 1)
    found = [routes(engine, mine, 1)]
    engine.free_cache()
    engine.wake_cache()
    return [*found, routes(engine, mine[::-1], 1)]


def routes(engine: Any, mine: Sequence[int], version: int) -> Routes:
    """Tokens and experts of some of the prompts."""
    asked = [GenerationRequest(i, PROMPTS[i], 100 + i) for i in mine]
    done = engine.generate(asked, SETTINGS, version)
    return {i: (c.token_ids, c.experts) for i, c in done.items()}


@dataclass(frozen=True, slots=True)
class MovedExperts:
    """What one rank sampled and counted.

    Attributes:
        linear: with neighbouring experts on a rank.
        moved: the same, with other places in every layer.
        unaware: with weights in other places, of which the tables do not know.
        loads: [layers, experts] tokens that this rank computed for ``linear`` and ``moved``.
    """

    linear: Sampled
    moved: Sampled
    unaware: Sampled
    loads: tuple[torch.Tensor, torch.Tensor]


def moved_experts(world: World, folder: str, layout: EngineLayout) -> MovedExperts:
    """Sample, move experts to other ranks, another way in each layer, and sample again."""
    engine = build(folder, "float32", layout, world.rank, counts=True)
    load(engine, folder, 1)
    engine.take_expert_load()  # steps before the first request
    mine = range(len(PROMPTS))[world.rank :: world.size]
    spec, views = engine._layout.spec, engine.weight_views()
    whole = {name: everyone(view) for name, view in views.items() if "experts.w" in name}
    sampled, loads = [sample(engine, 1, mine)], [engine.take_expert_load()]
    for version, told in ((2, True), (3, False)):
        engine.begin_update()
        slots = {n: rotated(spec.num_experts, version + n) for n in spec.expert_layers}
        if told:
            engine.place_experts(tuple(slots.items()))
        for name, view in engine.weight_views().items():
            if name in whole:
                layer = int(name.split(".layers.")[1].split(".")[0])
                first = world.rank * len(view)
                view.copy_(whole[name][list(slots[layer][first : first + len(view)])])
        engine.finish_update(version)
        sampled.append(sample(engine, version, mine))
        loads.append(engine.take_expert_load())
    return MovedExperts(sampled[0], sampled[1], sampled[2], (loads[0], loads[1]))


def everyone(view: torch.Tensor) -> torch.Tensor:
    """The experts of all ranks, in order."""
    parts = gather_objects(view.cpu())
    return torch.cat(parts).to(view.device)


def rotated(count: int, by: int) -> tuple[int, ...]:
    """Every expert in another slot, many of them on another rank."""
    return tuple((expert + by) % count for expert in range(count))
