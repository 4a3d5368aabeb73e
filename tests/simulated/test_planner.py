"""Reshard plans of all ranks against arrays that were sliced by hand.

The oracle in ``support/layout_oracle.py`` shares no code with the planner; messages travel through
``support/local_transport.py``, so the product's own executor moves real tensors. With a tight
bucket a reshard makes many rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reshard_figures import rank_floor
from support.layout_arrays import Case, hf_arrays
from support.layout_cases import (
    FIXED,
    FLASHCOMM,
    GQA,
    LATENT,
    MOE,
    MOVED,
    PLACED,
    PLAIN_LATENT,
    REDUNDANT,
    SLICED,
    TIED,
    cases,
    layouts_of,
)
from support.layout_oracle import megatron_params, vllm_params
from support.local_reshard import ITEM_BYTES, assert_arrived, move, smallest_bucket, tensors
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.weight_layouts.base import ShardLayout
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weights import schedule, transports
from mindspeed_rl.weights.exchange import shared_view
from mindspeed_rl.weights.planner import ReshardPlan, check_same_tensors, plan_reshard
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.traffic import element_bytes_of, rank_traffic


def plans_of(
    source: ShardLayout, target: ShardLayout, case: Case, relay: bool = False
) -> list[ReshardPlan]:
    return [
        plan_reshard(source, target, r, case.ranks_per_node, relay=relay) for r in range(case.world)
    ]


@given(cases())
@settings(max_examples=60, deadline=None)
@example(GQA)
@example(TIED)
@example(MOE)
@example(LATENT)
@example(PLAIN_LATENT)
@example(FLASHCOMM)
def test_layouts_declare_what_megatron_and_vllm_hold(case: Case) -> None:
    """Names and shapes of every rank; the HF tensors are the checkpoint's."""
    hf = hf_arrays(case)
    source, target = layouts_of(case)
    assert dict(source.hf_shapes) == {name: array.shape for name, array in hf.items()}
    assert dict(target.hf_shapes) == dict(source.hf_shapes)
    for rank in range(case.world):
        trainer, engine = megatron_params(case, hf, rank), vllm_params(case, hf, rank)
        assert source.local_shapes(rank) == {n: a.shape for n, a in trainer.items()}
        assert target.local_shapes(rank) == {n: a.shape for n, a in engine.items()}


@given(cases(), st.booleans(), st.booleans())
@settings(max_examples=16, deadline=None)
@example(GQA, True, False)
@example(GQA, True, True)
@example(TIED, True, False)
@example(MOE, True, False)
@example(MOE, True, True)
@example(LATENT, True, False)
@example(PLAIN_LATENT, True, True)
@example(FLASHCOMM, True, False)
@example(REDUNDANT, True, False)
@example(MOVED, True, False)
@example(replace(LATENT, dp=16, ranks_per_node=8), False, False)  # 64 ranks
@example(replace(MOE, dp=16, ranks_per_node=8), False, True)
def test_every_element_arrives_where_vllm_keeps_it(case: Case, tight: bool, relay: bool) -> None:
    """All ranks' plans, run by the executor: bit-equal to slicing, padding untouched."""
    source, target = layouts_of(case)
    bucket_bytes = smallest_bucket(case, source, target, relay) if tight else 10**9
    assert_arrived(case, move(case, source, target, bucket_bytes, relay))


@given(cases(), st.booleans(), st.integers(1, 64))
@settings(max_examples=10, deadline=None)
@example(GQA, False, 1)
@example(MOE, True, 24)
@example(LATENT, False, 8)
def test_every_element_arrives_without_staging(case: Case, relay: bool, alone: int) -> None:
    """Rectangles that are one run of memory on either side travel from or into it."""
    source, target = layouts_of(case)
    bucket_bytes = smallest_bucket(case, source, target, relay)
    with mock.patch.object(schedule, "ALONE_BYTES", alone):
        assert_arrived(case, move(case, source, target, bucket_bytes, relay, many_messages=True))


@pytest.mark.parametrize("case", FIXED)
def test_export_puts_whole_tensors_on_the_writer(case: Case) -> None:
    """The target of an HF export: every tensor complete, vocabulary padding left out."""
    source, _ = layouts_of(case)
    hf = hf_arrays(case)
    target = HfFileLayout(source.hf_shapes)
    bucket_bytes = smallest_bucket(case, source, target, relay=False)
    first, *others = move(case, source, target, bucket_bytes)
    assert list(first) == list(source.hf_shapes)
    for name, array in hf.items():
        np.testing.assert_array_equal(first[name].numpy(), array, name)
    assert not any(others)


@pytest.mark.parametrize("relay", [False, True])
def test_an_expert_that_a_rank_keeps_twice_arrives_once(relay: bool) -> None:
    """The second one is a copy within the engine, bit for bit."""
    case = replace(REDUNDANT, physical_experts=(1, 1, 0, 2, 3, 7, 6, 5, 4, 1, 0, 2), ep=2, etp=2)
    source, target = layouts_of(case)
    bytes_of = element_bytes_of(source, ITEM_BYTES)
    num_duplicates = 0
    for plan in plans_of(source, target, case, relay):
        received = rank_traffic(plan, bytes_of, case.ranks_per_node).receive_bytes
        assert received == rank_floor(source, target, plan.rank, bytes_of)
        num_duplicates += len(plan.local_duplicates)
    num_engines, num_layers, num_matrices = case.world // 4, sum(case.moe_layers), 3
    assert num_duplicates == num_engines * num_layers * num_matrices
    bucket_bytes = smallest_bucket(case, source, target, relay)
    assert_arrived(case, move(case, source, target, bucket_bytes, relay))


@pytest.mark.parametrize(
    ("case", "longest"),
    [
        (SLICED, 2),
        (replace(SLICED, ep=2, etp=2, transposed=False), 4),
        (MOE, 2),
        (PLACED, 4),
    ],
    ids=["sliced", "sliced by both", "etp", "moved"],
)
@pytest.mark.parametrize("relay", [False, True])
def test_experts_of_a_run_arrive_together(relay: bool, case: Case, longest: int) -> None:
    """A transfer carries the same rectangle of all experts that both sides place alike."""
    source, target = layouts_of(case)
    plans = plans_of(source, target, case, relay)
    moved = [t for p in plans for t in (*p.sends, *p.receives, *p.copies)]
    assert max(t.num_tensors for t in moved) == longest
    assert_arrived(case, move(case, source, target, 10**9, relay))


def test_the_digest_follows_everything_a_plan_depends_on() -> None:
    def digest(case: Case) -> str:
        return plan_reshard(*layouts_of(case), 0, case.ranks_per_node).digest

    changes = [
        replace(GQA, vocab=68),
        replace(GQA, engine_tp=2),
        replace(GQA, ranks_per_node=8),
        replace(GQA, qk_norm=True),
        replace(GQA, layer_list=(3, 1)),
        replace(GQA, num_layers=3, noop=(0,)),
        replace(GQA, num_layers=3, noop=(3,)),
        MOE,
        replace(MOE, etp=1),
        replace(MOE, engine_ep=True),
        replace(MOE, transposed=True),
    ]
    assert len({digest(case) for case in [GQA, *changes]}) == 1 + len(changes)


def test_layouts_of_different_models_are_refused() -> None:
    source, _ = layouts_of(GQA)
    _, target = layouts_of(replace(GQA, hidden=4))
    with pytest.raises(RuntimeError, match=r"model\.embed_tokens\.weight: \(67, 3\) -> \(67, 4\)"):
        check_same_tensors(source, target)


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [TIED, MOE, LATENT], ids=["dense", "sliced", "whole"])
def test_a_stream_delivers_every_tensor_of_the_checkpoint(case: Case) -> None:
    """Whole, to all ranks."""
    bucket_bytes = 3 << 10
    hf = hf_arrays(case)
    source, _ = layouts_of(case)

    def one_rank(rank: int, transport: LocalTransport) -> None:
        stream = TensorStream(
            source,
            range(case.world),
            rank=rank,
            ranks_per_node=case.ranks_per_node,
            transport=transport,
            dtype=torch.int32,
            bucket_bytes=bucket_bytes,
        )
        delivered: dict[str, torch.Tensor] = {}
        stream.run(tensors(megatron_params(case, hf, rank)), delivered.__setitem__)
        assert stream.resharder.schedule.num_rounds > 3
        assert delivered.keys() == hf.keys()
        for name, tensor in delivered.items():
            np.testing.assert_array_equal(tensor.numpy(), hf[name], name)

    LocalWorld(case.world).run(one_rank)


def test_messages_with_gaps_between_them_are_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-to-all-v sends one run of memory: a gap would shift what follows it."""
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *args, **options: None)
    transport = transports.make_transport("all-to-all", 4, torch.device("cpu"))
    memory = torch.zeros(12)
    with pytest.raises(AssertionError, match="follow each other"):
        transport.start({1: [memory[:3]], 2: [memory[4:]]}, {}, torch.float32)


@pytest.mark.parametrize("many_messages", [False, True])
@pytest.mark.parametrize("case", [GQA, LATENT], ids=["dense", "transposed experts"])
def test_a_view_that_copies_loses_nothing(
    case: Case, many_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under MindSpeed's ``torch.Tensor.view``, which copies memory with gaps."""
    view, copies = torch.Tensor.view, []

    def contiguous_first(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        if not tensor.is_contiguous():
            copies.append(tensor.shape)
            tensor = tensor.contiguous()
        return view(tensor, *args)

    monkeypatch.setattr(schedule, "ALONE_BYTES", 64)
    monkeypatch.setattr(torch.Tensor, "view", contiguous_first)
    assert_arrived(case, move(case, *layouts_of(case), 5 << 10, many_messages=many_messages))
    assert not copies


def test_a_view_that_is_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only MindSpeed's: whatever returns other memory would lose weights without an error."""
    memory = torch.zeros(8, 2, dtype=torch.uint8)
    assert shared_view(memory, (-1,)).data_ptr() == memory.data_ptr()
    assert shared_view(memory, torch.int16).shape == (8, 1)
    view = torch.Tensor.view
    monkeypatch.setattr(torch.Tensor, "view", lambda t, *args: view(t.clone(), *args))
    with pytest.raises(RuntimeError, match=r"torch\.Tensor\.view returns copies .*size \(8, 2\)"):
        shared_view(memory, (-1,))
    with pytest.raises(RuntimeError, match=r"weights would be lost"):
        move(GQA, *layouts_of(GQA), 5 << 10)
