"""Closed forms of the peers' ways against sets of elements that share no code with them.

Every element of the model has a number of its own in ``support.layout_oracle``; what a rank
receives is counted as a difference of sets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import GQA, LATENT, MOE, TIED, cases, layouts_of
from support.layout_oracle import megatron_params, vllm_params
from support.published import published_config

from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout
from mindspeed_rl.parallel.stages import listed_stages
from mindspeed_rl.resharding.layouts.megatron import MegatronLayout
from mindspeed_rl.resharding.layouts.vllm import VllmLayout

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)
from bench.peer_volumes import (  # noqa: E402
    Volumes,
    gather_volumes,
    stream_volumes,
    two_stage_volumes,
)

ITEM_BYTES = 4  # all tensors alike, those with a type of their own too
TIED_COPY = "output_layer.weight"


def trainer_weights(case: Case, rank: int) -> dict[str, Array]:
    """What peers send of a rank: a tied copy of the embedding stays at home."""
    params = megatron_params(case, hf_arrays(case), rank)
    return {n: a for n, a in params.items() if not (case.tied and n.endswith(TIED_COPY))}


def elements(arrays: Iterable[Array]) -> set[int]:
    found: set[int] = set()
    for array in arrays:
        found.update(np.asarray(array).ravel().tolist())
    return found - {PADDING}


def whole_size(case: Case) -> int:
    """Elements of the model with the padding of its vocabulary, as the trainer pads it."""
    sizes = {name: array.size for name, array in hf_arrays(case).items()}
    padding = -case.vocab % (case.vocab_divisor * case.tp) * case.hidden
    return sum(sizes.values()) + padding * (1 if case.tied else 2)


def is_expert(name: str) -> bool:
    return ".experts.local_experts." in name or ".experts.routed_experts." in name


def size_of(params: dict[str, Array]) -> int:
    return sum(array.size for array in params.values())


@given(cases())
@settings(max_examples=60, deadline=None)
@example(GQA)
@example(TIED)
@example(MOE)
@example(LATENT)
def test_gather_brings_every_rank_everything(case: Case) -> None:
    volumes = gather_volumes(*layouts_of(case), ITEM_BYTES)
    for rank in range(case.world):
        lacking = whole_size(case) - size_of(trainer_weights(case, rank))
        assert volumes.recv_bytes[rank] == lacking * ITEM_BYTES
    assert sum(volumes.send_bytes) == sum(volumes.recv_bytes)
    assert volumes.critical_bytes >= max(volumes.recv_bytes)


@given(cases().filter(lambda case: not case.physical_experts))
@settings(max_examples=60, deadline=None)
@example(MOE)
@example(LATENT)
def test_two_stage_brings_experts_only_where_they_are_needed(case: Case) -> None:
    """Dense tensors as in gather; expert shards of all stages; then what the engine lacks."""
    volumes = two_stage_volumes(*layouts_of(case), ITEM_BYTES)
    hf = hf_arrays(case)
    stage_size = case.world // case.pp
    experts = sum(a.size for n, a in hf.items() if ".mlp.experts." in n)
    for rank in range(case.world):
        mine = trainer_weights(case, rank)
        dense = whole_size(case) - experts
        dense -= size_of({n: a for n, a in mine.items() if not is_expert(n)})
        # the shards at this position of all stages are here after the broadcast
        staged = [
            array
            for peer in range(rank % stage_size, case.world, stage_size)
            for name, array in trainer_weights(case, peer).items()
            if is_expert(name)
        ]
        foreign = sum(a.size for a in staged)
        foreign -= sum(a.size for n, a in mine.items() if is_expert(n))
        engine = vllm_params(case, hf, rank)
        needed = elements(a for n, a in engine.items() if is_expert(n))
        exchanged = len(needed - elements(staged))
        assert volumes.recv_bytes[rank] == (dense + foreign + exchanged) * ITEM_BYTES
    assert sum(volumes.send_bytes) == sum(volumes.recv_bytes)


@given(cases())
@settings(max_examples=40, deadline=None)
@example(TIED)
@example(MOE)
def test_stream_brings_every_rank_all_hf_tensors(case: Case) -> None:
    volumes = stream_volumes(*layouts_of(case), ITEM_BYTES, bucket_bytes=1 << 10)
    total = sum(array.size for array in hf_arrays(case).values())
    for rank in range(case.world):
        own = len(elements(megatron_params(case, hf_arrays(case), rank).values()))
        assert volumes.recv_bytes[rank] == (total - own) * ITEM_BYTES
    sent, received = sum(volumes.send_bytes), sum(volumes.recv_bytes)
    assert received - case.world <= sent <= received, "means rounded down"


def test_a_single_rank_moves_nothing() -> None:
    case = Case(
        num_layers=1,
        hidden=4,
        ffn=4,
        kv_heads=1,
        heads_per_group=1,
        head_dim=2,
        vocab=8,
        tied=False,
        tp=1,
        pp=1,
        cp=1,
        dp=1,
        vocab_divisor=1,
        engine_tp=1,
        ranks_per_node=1,
    )
    for way in (gather_volumes, two_stage_volumes):
        volumes = way(*layouts_of(case), ITEM_BYTES)
        assert volumes.recv_bytes == volumes.send_bytes == (0,)
        assert volumes.messages_per_rank == volumes.collectives == 0


def deepseek(world: int) -> tuple[MegatronLayout, VllmLayout]:
    """TP4 PP8, 32 expert-parallel ranks -> engines of TP2 DP128 EP256."""
    spec = spec_from_hf_config(published_config("deepseek-v3"))
    stages = listed_stages(61, 8, (7, 8, 8, 8, 8, 8, 7, 7))
    parallel = ParallelLayout.build(world=world, stages=stages, tp=4, ep=32, etp=1)
    return MegatronLayout(spec, parallel), VllmLayout(spec, EngineLayout(world, 2, 128, True))


def mean(values: Iterable[int]) -> float:
    return float(np.mean(list(values)))


def test_deepseek_on_256_ranks() -> None:
    """By hand: 58 layers x 256 experts of 44.04 M parameters are 653.9 of 671.0 G in all.

    Both stages together bring each rank the 17.1 G dense ones less its own shard, 7/8 of the 8
    experts per layer of its position, and one expert per layer where it has not that one.
    """
    source, target = deepseek(256)
    expert_bytes = 3 * 7168 * 2048 * 2
    dense_bytes = 2 * 671_026_419_200 - 58 * 256 * expert_bytes
    volumes: Volumes = two_stage_volumes(source, target, 2)
    of_experts = 58 * expert_bytes * (8 * 7 / 8 + 31 / 32)
    assert mean(volumes.recv_bytes) == pytest.approx(dense_bytes + of_experts, rel=0.03)
    everything = gather_volumes(source, target, 2)
    assert mean(everything.recv_bytes) == pytest.approx(2 * 671_026_419_200, rel=0.01)


def test_large_worlds_cost_no_more() -> None:
    """Helpers call this for 4096 ranks; a plan of all pairs would hit the time limit of tests."""
    source, target = deepseek(4096)
    few = [way(source, target, 2) for way in (gather_volumes, two_stage_volumes)]
    few.append(stream_volumes(source, target, 2, bucket_bytes=512 << 20))
    assert all(len(volumes.recv_bytes) == 4096 for volumes in few)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cases", "gpt-2"], "--cases gpt-2: unknown; known: all, qwen2.5-7b"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--bucket-mb", "0"], "--bucket-mb 0: must be at least 1"),
        (["--ways", "gather"], "--ways gather: direct and some of direct-all-to-all, stream"),
        (["--ways", "direct,copy"], "--ways direct,copy: direct and some of"),
    ],
)
def test_mistakes_on_the_command_line_name_flag_and_remedy(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.reshard import parse

    with pytest.raises(SystemExit):
        parse(flags)
    assert told in capsys.readouterr().err


def test_experts_are_halved_until_a_case_fits() -> None:
    from bench.cases import build_case

    roomy = build_case("deepseek-v3", 4, 16, 1 << 50)
    assert roomy.source.spec.num_experts == 16
    tight = build_case("deepseek-v3", 4, 16, 20 << 30)
    assert 4 <= tight.source.spec.num_experts < 16
    assert f"{tight.source.spec.num_experts} of 256 experts" in tight.title
    with pytest.raises(ValueError, match=r"--cases deepseek-v3: needs .* GB are free"):
        build_case("deepseek-v3", 4, 16, 1 << 30)
    fewer = build_case("deepseek-v3", 4, 16, 20 << 30, ("direct", "gather"))
    assert fewer.source.spec.num_experts > tight.source.spec.num_experts
    with pytest.raises(ValueError, match=r"--num-experts 6: .* multiples of 4"):
        build_case("deepseek-v3", 4, 6, 1 << 50)
