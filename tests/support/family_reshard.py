"""Every family from real trainers into declared engine layouts, without an engine.

What each engine rank must hold comes from ``support.layout_oracle``, which is told the model by its
config.json and slices the tensors of its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.layout_arrays import Case, Latent
from support.layout_oracle import vllm_params
from support.training_worlds import make_job

from mindspeed_rl.launch.bootstrap import World

BUCKET_BYTES = 8 << 10
NUM_SYNCS = 3
_UNTOUCHED = -1  # the oracle's padding


@dataclass(frozen=True, slots=True)
class Rollout:
    """An engine layout, and how the weights get there.

    Attributes:
        tp: tensor-parallel ranks of an engine.
        whole_experts: expert parallelism over them, instead of slices of every expert.
        transposed: experts as vLLM-Ascend stores them.
        transport: of the executor.
    """

    tp: int
    whole_experts: bool = False
    transposed: bool = False
    transport: str = "all-to-all"


@dataclass(frozen=True, slots=True)
class Moved:
    """One model in one engine layout on one rank.

    Attributes:
        wrong: after each sync, parameters whose bits are not the oracle's.
        num_params: engine parameters of the rank.
        num_rounds: of one sync.
    """

    wrong: list[list[str]]
    num_params: int
    num_rounds: int


def family_reshard_world(
    world: World, models: Mapping[str, str], flags: Sequence[str], rollouts: Sequence[Rollout]
) -> dict[str, list[Moved]]:
    """Rank function: build every trainer, reshard it three times to every engine layout."""
    from mindspeed_rl.building.models import build_engine, initialize_parallel

    reports: dict[str, list[Moved]] = {}
    for name, folder in models.items():
        job = make_job(world, folder, flags)
        if not reports:
            initialize_parallel(job)
        engine = build_engine(job, "policy", 1)
        reports[name] = [
            three_syncs(job.plan.megatron, world, engine.named_parameters(), folder, rollout)
            for rollout in rollouts
        ]
    return reports


def three_syncs(
    source: Any, world: World, read: Mapping[str, torch.Tensor], folder: str, rollout: Rollout
) -> Moved:
    """Collective: the world. The trainer's weights double between syncs, and are put back."""
    from mindspeed_rl.core.layout import EngineLayout
    from mindspeed_rl.engines.vllm.layout import VllmLayout
    from mindspeed_rl.weights.executor import Resharder
    from mindspeed_rl.weights.transports import make_transport

    grid = EngineLayout(world.size, rollout.tp, 1, rollout.whole_experts)
    target = VllmLayout(source.spec, grid, transposed_experts=rollout.transposed)
    device = next(iter(read.values())).device
    resharder = Resharder(
        source,
        target,
        rank=world.rank,
        ranks_per_node=world.size // 2,
        transport=make_transport(rollout.transport, world.size, device),
        dtype=torch.float32,
        bucket_bytes=BUCKET_BYTES,
    )
    engine = {
        "engine_tp": rollout.tp,
        "engine_ep": rollout.whole_experts,
        "transposed": rollout.transposed,
    }
    write = {
        name: torch.full(shape, _UNTOUCHED, dtype=torch.int32, device=device).view(torch.float32)
        for name, shape in target.local_shapes(world.rank).items()
    }
    wrong = []
    for sync in range(NUM_SYNCS):
        resharder.run(read, write)
        expected = oracle_bits(folder, world.rank, torch.float32, 2.0**sync, **engine)
        wrong.append(differing(write, expected))
        for parameter in read.values():
            parameter.data *= 2.0 if sync < NUM_SYNCS - 1 else 0.5 ** (NUM_SYNCS - 1)
    return Moved(wrong, len(write), len(resharder.rounds))


def oracle_bits(
    folder: str, rank: int, dtype: torch.dtype, scale: float = 1.0, **engine: Any
) -> dict[str, torch.Tensor]:
    """The parameters of an engine's rank as int32 bit patterns, 16-bit ones sign-extended.

    From config.json and the checkpoint alone; ``engine`` are fields of the oracle's case.
    """
    case = replace(case_of(json.loads((Path(folder) / "config.json").read_text())), **engine)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    weights = load_file(Path(folder) / "model.safetensors")
    arrays = {n: (w.float() * scale).to(dtype).view(bits).int() for n, w in weights.items()}
    params = vllm_params(case, {name: array.numpy() for name, array in arrays.items()}, rank)
    return {name: torch.from_numpy(array) for name, array in params.items()}


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the parameters whose bits are not the expected ones."""
    assert found.keys() == expected.keys()
    bits = {
        n: t.cpu().view(torch.int32 if t.itemsize == 4 else torch.int16) for n, t in found.items()
    }
    return [name for name, want in expected.items() if not torch.equal(bits[name].int(), want)]


def case_of(config: Mapping[str, Any]) -> Case:
    """The oracle's description of a model, from its config.json alone."""
    kind, num_layers = config["model_type"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    case = Case(
        num_layers=num_layers,
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        kv_heads=kv_heads,
        heads_per_group=heads // kv_heads,
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        tp=1,
        pp=1,
        cp=1,
        dp=1,
        vocab_divisor=8,
        engine_tp=1,
        ranks_per_node=1,
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
    )
    if kind == "qwen3_moe":
        dense = config["mlp_only_layers"]
        return replace(
            case,
            experts=config.get("num_experts") or config["num_local_experts"],
            expert_ffn=config["moe_intermediate_size"],
            moe_layers=tuple(layer not in dense for layer in range(num_layers)),
        )
    if kind != "deepseek_v3":
        return case
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return replace(
        case,
        kv_heads=heads,
        heads_per_group=1,
        latent=Latent(config["q_lora_rank"] or 0, *(config[key] for key in sizes)),
        experts=config["n_routed_experts"],
        expert_ffn=config["moe_intermediate_size"],
        moe_layers=tuple(layer >= config["first_k_dense_replace"] for layer in range(num_layers)),
        shared_ffn=config["n_shared_experts"] * config["moe_intermediate_size"],
        router_bias=True,
    )
