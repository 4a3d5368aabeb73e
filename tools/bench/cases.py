"""Models of the benchmark: two layers of real shape each, with layouts for 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bench.trainer_tensors import trainer_tensors
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout
from mindspeed_rl.parallel.stages import even_stages
from mindspeed_rl.resharding.layouts.base import ShardLayout
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout

NUM_LAYERS = 2
WAYS = ("direct", "direct-all-to-all", "stream", "gather", "two-stage")
# these hold whole tensors
_STAGING_WAYS = frozenset(("stream", "gather", "two-stage"))
# rows of embedding and head: the layers are what is measured
VOCAB = 1024
_ITEM_BYTES = {"": 2, "float32": 4}
# a Python process with torch, and the buffers of the bare collectives
_RANK_BYTES = 512 << 20
_OTHER_BUFFERS_BYTES = 256 << 20

_COMMON: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
_QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 0,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of both sides for one number of ranks."""

    tp: int
    pp: int
    ep: int
    engine_tp: int
    engine_dp: int


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A model with its layouts.

    Attributes:
        name: of the published model.
        config: keys of its config.json.
        layouts: by number of ranks.
        experts_per_rank: of a layer and engine rank, unless told otherwise; 0: dense.
        published_experts: of the published model.
        to_trainer: the target is a trainer without pipeline instead of an engine.
    """

    name: str
    config: Mapping[str, Any]
    layouts: Mapping[int, Sizes]
    experts_per_rank: int = 0
    published_experts: int = 0
    to_trainer: bool = False


_EXPERT_SIZES = {4: Sizes(2, 2, 2, 2, 2), 8: Sizes(4, 2, 4, 2, 4)}
CASES = {
    case.name: case
    for case in (
        BenchCase("qwen2.5-7b", _QWEN25_7B, {4: Sizes(2, 2, 1, 2, 1), 8: Sizes(4, 2, 1, 2, 1)}),
        BenchCase("qwen3-30b-a3b", _QWEN3_30B_A3B, _EXPERT_SIZES, 8, 128),
        BenchCase("deepseek-v3", _DEEPSEEK_V3, _EXPERT_SIZES, 1, 256),
        BenchCase(
            "qwen2.5-7b-to-megatron",
            _QWEN25_7B,
            {4: Sizes(2, 2, 1, 2, 1), 8: Sizes(4, 2, 1, 2, 1)},
            to_trainer=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class BuiltCase:
    """A case as it runs.

    Attributes:
        name: of the case.
        source: the trainer.
        target: the engine, or another trainer.
        title: both layouts and how the model differs from the published one.
    """

    name: str
    source: MegatronLayout
    target: VllmLayout | MegatronLayout
    title: str


def hf_bytes(layout: ShardLayout) -> int:
    """Size of the HF tensors in bfloat16."""
    shapes = layout.hf_shapes
    return sum(prod(s) * _ITEM_BYTES[layout.dtype_of(name)] for name, s in shapes.items())


def build_case(
    name: str, num_ranks: int, num_experts: int, free_bytes: int, ways: Sequence[str] = WAYS
) -> BuiltCase:
    """The layouts of a case; experts are halved until everything fits.

    Args:
        name: a key of ``CASES``.
        num_ranks: 4 or 8.
        num_experts: of a layer; 0: the case's own.
        free_bytes: memory that all ranks together may take.
        ways: that are raced.

    Raises:
        ValueError: the smallest number of experts does not fit, or the experts do not divide.
    """
    case = CASES[name]
    default = case.experts_per_rank * num_ranks
    experts = (num_experts or default) if case.published_experts else 0
    least = num_ranks if experts else 0
    if experts > max(default, case.published_experts):
        raise ValueError(
            f"--num-experts {experts}: {name} has {case.published_experts}; give at most that"
        )
    while True:
        built = _build(case, num_ranks, experts)
        needed = _needed_bytes(built, ways)
        if needed <= free_bytes:
            return built
        if experts // 2 < max(1, least):
            raise ValueError(
                f"--cases {name}: needs {needed / 1e9:.1f} GB, {free_bytes / 1e9:.1f} GB are free; "
                "choose a smaller case, fewer --ranks or --ways, or free memory"
            )
        experts = experts // 2 // num_ranks * num_ranks


def _build(case: BenchCase, num_ranks: int, experts: int) -> BuiltCase:
    sizes = case.layouts[num_ranks]
    config = {**_COMMON, **case.config}
    if experts:
        if experts % num_ranks:
            raise ValueError(
                f"--num-experts {experts}: the engine's {num_ranks} ranks cannot share them; "
                f"allowed: multiples of {num_ranks}"
            )
        top_k = min(int(config["num_experts_per_tok"]), experts)
        config |= {"num_experts": experts, "num_experts_per_tok": top_k}
    spec: ModelSpec = spec_from_hf_config(config)
    parallel = ParallelLayout.build(
        world=num_ranks,
        stages=even_stages(NUM_LAYERS, sizes.pp),
        tp=sizes.tp,
        ep=sizes.ep,
        etp=1,
    )
    title = f"{case.name}: TP{sizes.tp} PP{sizes.pp}" + (f" EP{sizes.ep}" if experts else "")
    target: VllmLayout | MegatronLayout
    if case.to_trainer:
        stages = even_stages(NUM_LAYERS)
        grid = ParallelLayout.build(world=num_ranks, stages=stages, tp=sizes.engine_tp)
        target = MegatronLayout(spec, grid)
        title += f" -> trainer of TP{grid.tp} DP{grid.dp}"
    else:
        engine = EngineLayout(num_ranks, sizes.engine_tp, sizes.engine_dp, experts > 0)
        target = VllmLayout(spec, engine)
        title += f" -> engine of TP{engine.tp}" + (f" DP{engine.dp} EP{engine.ep}" * (experts > 0))
        title += f" x {engine.num_replicas}"
    title += f"; {NUM_LAYERS} layers, vocabulary {VOCAB}"
    if experts:
        title += f", {experts} of {case.published_experts} experts per layer"
    return BuiltCase(case.name, MegatronLayout(spec, parallel), target, title)


def _needed_bytes(built: BuiltCase, ways: Sequence[str]) -> int:
    """The file, both sides on all ranks, and on each rank buffers and the interpreter.

    The largest round of a baseline has the largest parameter, whole, of every stage; both baselines
    keep theirs, and ``stream`` makes as much anew.
    """
    parallel = built.source.parallel
    largest = max(t.group * t.shard_bytes for t in trainer_tensors(built.source, 2))
    engine_case = not isinstance(built.target, MegatronLayout)
    num_staging = len(_STAGING_WAYS.intersection(ways)) if engine_case else 1
    buffers = num_staging * (parallel.pp * largest + _OTHER_BUFFERS_BYTES) + _OTHER_BUFFERS_BYTES
    total = hf_bytes(built.source) + parallel.world * (buffers + _RANK_BYTES)
    for layout in (built.source, built.target):
        for rank in range(parallel.world):
            total += sum(2 * prod(shape) for shape in layout.local_shapes(rank).values())
    return total


def available_bytes() -> int:
    """Memory that can be had without swapping (Linux)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
