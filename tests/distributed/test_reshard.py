"""A reshard between real ranks moves every bit to its place, and its proof finds a wrong bit.

Four ranks hold a real megatron-core model as TP2 x PP2. What each engine rank must hold comes from
``support.layout_oracle``, which slices whole Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from support.family_reshard import differing, oracle_bits
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
        trainer_flip: the same after one bit changed in a shard of the last trainer rank.
        diverged: the same after a reshard from a trainer whose last rank has one other bit in a
            replicated tensor, and where.
    """

    wrong: list[str]
    num_rounds: int
    proof: list[str]
    engine_flip: list[str]
    trainer_flip: list[str]
    diverged: list[str]


def reshard_world(world: World, models: Mapping[str, str]) -> dict[str, ReshardFacts]:
    """Reshard both models to every engine size."""
    from mindspeed_rl.rl.build_models import build_engine

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
    from mindspeed_rl.weights.verify import WeightVerifier

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
    with flipped_bit(read[FLIPPED_PARAM] if last else None):
        trainer_flip = differing()
    with flipped_bit(read[DIVERGED_PARAM] if last else None):
        move()
        diverged = [*differing(), located(DIVERGED)]
    return proof, engine_flip, trainer_flip, diverged


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
        assert tensor == FLIPPED_ENGINE
        assert where.startswith(f"{tensor}[64, {column}] on rank 3 ({FLIPPED_ENGINE}): ")
        assert report.trainer_flip == [FLIPPED_TRAINER]
        tensor, where = report.diverged
        assert tensor == DIVERGED and where.startswith(f"{DIVERGED}[64] on rank ")
