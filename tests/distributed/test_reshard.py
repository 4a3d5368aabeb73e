"""Reshards between real ranks move every bit to its place, and their proof finds a wrong bit.

Four ranks hold a real megatron-core model as TP2 x PP2. What each engine rank must hold comes from
``support.layout_oracle``, which slices whole Hugging Face tensors. Experts are moved between four
and eight ranks in the shapes of two models, from arrays that the oracle sliced for the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.family_reshard import differing, oracle_bits
from support.layout_arrays import PADDING, Case, Latent, hf_arrays
from support.layout_cases import layouts_of
from support.layout_oracle import megatron_params, vllm_params
from support.local_reshard import UNTOUCHED as NOT_WRITTEN
from support.local_reshard import smallest_bucket, tensors
from support.spawn import run_ranks
from support.training_worlds import start_job

from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.config import RLRunConfig
    from mindspeed_rl.launch.job import Job
    from mindspeed_rl.planning.run_plan import RLPlan

pytestmark = pytest.mark.distributed

ENGINE_SIZES = (1, 2, 4)  # two key/value heads: with 4 ranks each is held twice
BUCKET_BYTES = 256 << 10
# transport, ranks per node, relay
WAYS = (("p2p", 4, False), ("all-to-all", 2, True), ("all-to-all", 4, False))
UNTOUCHED = -1  # bit pattern of elements that no transfer may write: the vocabulary padding
FLIPPED_ENGINE = "model.layers.2.mlp.down_proj.weight"
FLIPPED_TRAINER, FLIPPED_PARAM = (
    "model.layers.3.self_attn.o_proj.weight",
    ("decoder.layers.1.self_attention.linear_proj.weight"),
)
DIVERGED, DIVERGED_PARAM = "model.norm.weight", "decoder.final_layernorm.weight"


@dataclass(frozen=True, slots=True)
class ReshardFacts:
    """What one rank saw of one reshard.

    Attributes:
        wrong: parameters whose bits differ from the oracle's.
        num_rounds: rounds that the bucket size made.
        proof: HF tensors that differ after the reshard, as the checksums say.
        engine_flip: the same after one bit changed in the last engine rank, and where.
        sampled: tensors that as many samples in a row find then as have each row once.
        trainer_flip: the same after one bit changed in a shard of the last trainer rank.
        diverged: the same after a reshard from a trainer whose last rank has one other bit in a
            replicated tensor, and where.
    """

    wrong: list[str]
    num_rounds: int
    proof: list[str]
    engine_flip: list[str]
    sampled: list[str]
    trainer_flip: list[str]
    diverged: list[str]


def reshard_world(world: World, models: Mapping[str, str]) -> dict[str, ReshardFacts]:
    """Reshard both models to every engine size."""
    from mindspeed_rl.building.models import build_engine

    reports: dict[str, ReshardFacts] = {}
    for model, folder in models.items():
        layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
        for size in ENGINE_SIZES:
            flags = [*layout, "--make-vocab-size-divisible-by", "8", "--rollout-tp", str(size)]
            job = start_job(world, folder, flags)
            engine = build_engine(job, "policy", 1)
            for dtype in (torch.float32, torch.bfloat16):
                name = f"{model}-tp{size}-{str(dtype).removeprefix('torch.')}"
                reports[name] = reshard_and_prove(
                    Reshard(job, engine.named_parameters(), folder, dtype)
                )
    return reports


@dataclass(frozen=True, slots=True)
class Reshard:
    """One model, one engine size, one data type, on one rank.

    Attributes:
        job: with the plan.
        read: the trainer's parameters.
        folder: of the checkpoint that they came from.
        dtype: that travels.
    """

    job: Job[RLRunConfig, RLPlan]
    read: Mapping[str, torch.Tensor]
    folder: str
    dtype: torch.dtype

    def common(self, transport: str) -> dict[str, Any]:
        """Arguments of whatever moves weights."""
        from mindspeed_rl.weights.transports import make_transport

        world = self.job.world
        wire = make_transport(transport, world.size, torch.device("cpu"))
        sizes = {"rank": world.rank, "dtype": self.dtype, "bucket_bytes": BUCKET_BYTES}
        return {**sizes, "transport": wire}


def reshard_and_prove(reshard: Reshard) -> ReshardFacts:
    """Collective: the world."""
    from mindspeed_rl.weights.executor import Resharder

    plan, world = reshard.job.plan, reshard.job.world
    source, target = plan.megatron, plan.rollout_layout
    bits = torch.int32 if reshard.dtype is torch.float32 else torch.int16
    expected = oracle_bits(reshard.folder, world.rank, reshard.dtype, engine_tp=plan.engine.tp)
    wrong: list[str] = []
    for way, per_node, relay in WAYS:
        resharder = Resharder(
            source, target, ranks_per_node=per_node, relay=relay, **reshard.common(way)
        )
        write = {
            name: torch.full(shape, UNTOUCHED, dtype=bits).view(reshard.dtype)
            for name, shape in target.local_shapes(world.rank).items()
        }
        resharder.run(reshard.read, write)
        wrong += [f"{way} {name}" for name in differing(write, expected)]
    wrong += stream_whole_tensors(reshard)
    rounds = len(resharder.rounds)
    proofs = prove(reshard, write, lambda: resharder.run(reshard.read, write))
    return ReshardFacts(wrong, rounds, *proofs)


def stream_whole_tensors(reshard: Reshard) -> list[str]:
    """Two ranks get all tensors: those that are missing or have a wrong bit."""
    from mindspeed_rl.weights.stream import TensorStream

    takes = reshard.job.world.rank in (1, 2)
    stream = TensorStream(
        reshard.job.plan.megatron, range(1, 3), ranks_per_node=4, **reshard.common("all-to-all")
    )
    whole: dict[str, torch.Tensor] = {}
    stream.run(reshard.read, whole.__setitem__ if takes else None)
    hf = load_file(Path(reshard.folder) / "model.safetensors") if takes else {}
    right = {n for n, tensor in whole.items() if torch.equal(hf[n].to(reshard.dtype), tensor)}
    return sorted(hf.keys() - right)


def prove(
    reshard: Reshard, write: Mapping[str, torch.Tensor], move: Callable[[], object]
) -> tuple[list[str], ...]:
    """What the checksums find as it is, and with one bit changed in three places of the last rank.

    The last change happens before ``move`` moves the weights once more.
    """
    from mindspeed_rl.weights.verify import SAMPLED_ROWS, WeightVerifier

    plan, world, read = reshard.job.plan, reshard.job.world, reshard.read
    last = world.rank == world.size - 1
    verifier = WeightVerifier(plan.megatron, plan.rollout_layout, world.rank, reshard.dtype)

    def differing() -> list[str]:
        return verifier.differing_tensors(read, write)

    def located(name: str) -> str:
        return str(verifier.first_difference(name, read, write))

    proof = differing()
    with flipped_bit(write[FLIPPED_ENGINE] if last else None):
        engine_flip = [*differing(), located(FLIPPED_ENGINE)]
        samples = (verifier.differing_tensors(read, write, sample=n) for n in range(SAMPLED_ROWS))
        sampled = [name for wrong in samples for name in wrong]
    with flipped_bit(read[FLIPPED_PARAM] if last else None):
        trainer_flip = differing()
    with flipped_bit(read[DIVERGED_PARAM] if last else None):
        move()
        diverged = [*differing(), located(DIVERGED)]
    return proof, engine_flip, sampled, trainer_flip, diverged


@contextmanager
def flipped_bit(tensor: torch.Tensor | None) -> Iterator[None]:
    """Flip the lowest bit of the middle element that survives a cast to bfloat16."""
    if tensor is None:
        yield
        return
    view = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    mask = 1 << 16 if tensor.element_size() == 4 else 1
    middle = tuple(size // 2 for size in view.shape)
    view[middle] ^= mask
    yield
    view[middle] ^= mask


@pytest.fixture(scope="module")
def resharded(
    tiny_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, ReshardFacts]]:
    """Reports of all ranks."""
    folder = tmp_path_factory.mktemp("reshard")
    models = {"tiny": str(tiny_model), "tied": str(tied_model)}
    return run_ranks(reshard_world, 4, work_dir=folder, args=(models,))


NAMES = [f"{m}-tp{n}-{d}" for m in ("tiny", "tied") for n in ENGINE_SIZES
         for d in ("float32", "bfloat16")]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_rank_holds_the_bits_of_the_oracle(
    name: str, resharded: list[dict[str, ReshardFacts]]
) -> None:
    for report in (rank[name] for rank in resharded):
        assert report.wrong == []
        assert report.proof == []
        assert report.num_rounds > 3, "the bucket must force several rounds"


@pytest.mark.parametrize("name", NAMES)
def test_proof_names_the_tensor_of_a_flipped_bit(
    name: str, resharded: list[dict[str, ReshardFacts]]
) -> None:
    """One bit, on one rank of one side; every rank is told."""
    for report in (rank[name] for rank in resharded):
        tensor, where = report.engine_flip
        size = ENGINE_SIZES[NAMES.index(name) // 2 % len(ENGINE_SIZES)]
        column = 256 - 128 // size  # the middle of the last of so many shares of 256
        assert tensor == FLIPPED_ENGINE and report.sampled == [FLIPPED_ENGINE]
        assert where.startswith(f"{tensor}[64, {column}] on rank 3 ({FLIPPED_ENGINE}): ")
        assert report.trainer_flip == [FLIPPED_TRAINER]
        tensor, where = report.diverged
        assert tensor == DIVERGED and where.startswith(f"{DIVERGED}[64] on rank ")


# --- experts ------------------------------------------------------------------------------------

# The proportions of Qwen3-30B-A3B and of DeepSeek-V3, small; experts whole in training, and cut by
# the tensor parallelism of engines without expert parallelism.
QWEN_30B = Case(
    num_layers=3, hidden=16, ffn=24, kv_heads=2, heads_per_group=4, head_dim=8, vocab=96,
    tied=False, qk_norm=True, experts=16, expert_ffn=16, moe_layers=(True,) * 3, tp=1, pp=2, cp=1,
    dp=2, vocab_divisor=8, ep=2, etp=1, layer_list=(2, 1), engine_tp=2, ranks_per_node=4,
)  # fmt: skip
DEEPSEEK_V3 = replace(
    QWEN_30B, num_layers=4, qk_norm=False, kv_heads=4, heads_per_group=1, head_dim=0, experts=8,
    latent=Latent(q_lora=12, kv_lora=8, nope=4, rope=2, v=4), moe_layers=(False, True, True, True),
    shared_ffn=8, router_bias=True, layer_list=(3, 1), ranks_per_node=2,
)  # fmt: skip
EXPERTS = {
    4: {
        "qwen3-30b to tp2": QWEN_30B,
        "qwen3-30b to tp4": replace(QWEN_30B, engine_tp=4, transposed=True),
        "deepseek-v3 to tp4": replace(DEEPSEEK_V3, engine_tp=4),
        "deepseek-v3 to ep4": replace(DEEPSEEK_V3, engine_tp=2, engine_dp=2, engine_ep=True),
    },
    8: {
        "qwen3-30b to tp2": replace(QWEN_30B, dp=4, ep=4),
        "qwen3-30b tp2 to tp8": replace(QWEN_30B, tp=2, ep=4, kv_heads=8, engine_tp=8),
        "deepseek-v3 to tp8": replace(DEEPSEEK_V3, dp=4, ep=4, kv_heads=8, engine_tp=8),
        "deepseek-v3 tp2 etp2 to tp4": replace(DEEPSEEK_V3, tp=2, ep=2, etp=2, engine_tp=4),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """What one rank saw of one reshard.

    Attributes:
        wrong: parameters whose bits differ from the oracle's.
        proof: HF tensors that differ, as the checksums say.
        longest_run: most experts that one transfer carried.
        num_turns: turns that pairs of ranks took.
    """

    wrong: list[str]
    proof: list[str]
    longest_run: int
    num_turns: int


def expert_world(world: World, cases: Mapping[str, Case]) -> dict[str, list[ExpertFacts]]:
    """Reshard all cases by both transports, at once and in turns."""
    from mindspeed_rl.weights import turns

    some = turns.TurnChoice(turns.RankTurns(3), 0.0)
    reports: dict[str, list[ExpertFacts]] = {}
    for name, case in cases.items():
        reports[name] = [reshard_experts(world, case, way) for way in ("p2p", "all-to-all")]
        with mock.patch.object(turns, "choose_turns", lambda *_: some):
            reports[name] += [reshard_experts(world, case, way) for way in ("p2p", "all-to-all")]
    return reports


def reshard_experts(world: World, case: Case, way: str) -> ExpertFacts:
    """Collective: the world."""
    from mindspeed_rl.weights.executor import Resharder
    from mindspeed_rl.weights.transports import make_transport
    from mindspeed_rl.weights.verify import WeightVerifier

    source, target = layouts_of(case)
    resharder = Resharder(
        source,
        target,
        rank=world.rank,
        ranks_per_node=case.ranks_per_node,
        transport=make_transport(way, world.size, torch.device("cpu")),
        dtype=torch.int32,
        bucket_bytes=4 * smallest_bucket(case, source, target, relay=False),
    )
    hf = hf_arrays(case)
    read = tensors(megatron_params(case, hf, world.rank))
    shapes = target.local_shapes(world.rank)
    write = {
        name: torch.full(size, NOT_WRITTEN, dtype=torch.int32) for name, size in shapes.items()
    }
    resharder.run(read, write)
    wanted = vllm_params(case, hf, world.rank)
    wrong = [
        name
        for name, values in wanted.items()
        if not np.array_equal(np.where(values == PADDING, NOT_WRITTEN, values), write[name].numpy())
    ]
    # The checksums take floating types: the same bits.
    as_floats = ({n: t.view(torch.float32) for n, t in side.items()} for side in (read, write))
    proof = WeightVerifier(source, target, world.rank, torch.float32).differing_tensors(*as_floats)
    moved = (*resharder.plan.receives, *resharder.plan.sends, *resharder.plan.copies)
    slots = next(iter(resharder.schedule.slots.values()))
    return ExpertFacts(wrong, proof, max(t.num_tensors for t in moved), slots[0].turns.count)


@pytest.mark.parametrize("num_ranks", EXPERTS)
def test_experts_arrive_bit_for_bit(num_ranks: int, tmp_path: Path) -> None:
    """Cut by the engine's tensor parallelism or whole, many in a transfer, at once or in turns."""
    cases = EXPERTS[num_ranks]
    assert {case.world for case in cases.values()} == {num_ranks}
    for rank in run_ranks(expert_world, num_ranks, work_dir=tmp_path, args=(cases,)):
        for name, reports in rank.items():
            assert [report.wrong for report in reports] == [[]] * 4, name
            assert [report.proof for report in reports] == [[]] * 4, name
            few, again, many, more = [report.num_turns for report in reports]
            assert few == again < many == more == 3, name
            assert {report.longest_run for report in reports} == {longest_run(cases[name])}, name


def longest_run(case: Case) -> int:
    """Experts of a trainer's rank that an engine's rank has as well."""
    in_engine = case.experts // (case.engine_tp * case.engine_dp if case.engine_ep else 1)
    return min(case.experts // case.ep, in_engine)
