"""What a sync may cost: collectives by its rounds, a node's bytes by its floor, staging.

All ranks in one process; :mod:`support.local_transport` counts what the product's executor posts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import (
    GQA,
    LATENT,
    MOE,
    PIPELINED_ENGINE,
    REDUNDANT,
    TIED,
    cases,
    layouts_of,
)
from support.layout_oracle import megatron_params, vllm_params
from support.local_transport import LocalTransport, LocalWorld
from support.tensor_tracker import TensorTracker

from mindspeed_rl.rollout.vllm.layout import VllmLayout
from mindspeed_rl.weights import exchange, transports
from mindspeed_rl.weights.exchange import shared_view
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.layouts.base import ShardLayout
from mindspeed_rl.weights.layouts.megatron import MegatronLayout
from mindspeed_rl.weights.schedule import Schedule
from mindspeed_rl.weights.stream import TensorStream
from mindspeed_rl.weights.traffic import ElementBytes, element_bytes_of

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.insert(0, TOOLS)

ITEM_BYTES = 4
BUCKET_BYTES = 5 << 10


def resharder_of(
    case: Case, rank: int, transport: LocalTransport, bucket_bytes: int, relay: bool = False
) -> tuple[Resharder, MegatronLayout, VllmLayout]:
    source, target = layouts_of(case)
    resharder = Resharder(
        source,
        target,
        rank=rank,
        ranks_per_node=case.ranks_per_node,
        transport=transport,
        dtype=torch.int32,
        bucket_bytes=bucket_bytes,
        relay=relay,
    )
    return resharder, source, target


def tensors(params: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in params.items()}


def empty(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {n: torch.full(shape, PADDING, dtype=torch.int32) for n, shape in shapes.items()}


# --- collectives -------------------------------------------------------------------------------

MANY = replace(
    LATENT,
    num_layers=8,
    layer_list=(),
    moe_layers=(True,) * 8,
    experts=48,
    dp=2,
    hidden=4,
)


@pytest.mark.parametrize(
    ("bucket_bytes", "relay", "rounds"),
    [(1 << 30, True, range(1, 3)), (64 << 10, False, range(4, 40))],
    ids=["one round, relay", "many rounds"],
)
def test_collectives_follow_the_rounds_and_not_the_tensors(
    bucket_bytes: int, relay: bool, rounds: range
) -> None:
    """More than a thousand tensors, three syncs: one exchange per round and hop.

    The plans are compared once, before the first round. Two types of elements make two rounds.
    """
    num_syncs, hops = 3, 1 + relay
    hf = hf_arrays(MANY)
    assert len(hf) > 1000

    def one_rank(rank: int, transport: LocalTransport) -> tuple[int, int, int]:
        resharder, _, target = resharder_of(MANY, rank, transport, bucket_bytes, relay)
        read = tensors(megatron_params(MANY, hf, rank))
        write = empty(target.local_shapes(rank))
        for _ in range(num_syncs):
            resharder.run(read, write)
        return resharder.schedule.num_rounds, transport.num_exchanges, transport.num_gathers

    for num_rounds, num_exchanges, num_gathers in LocalWorld(MANY.world).run(one_rank):
        assert num_rounds in rounds
        assert num_exchanges == num_syncs * hops * num_rounds
        assert num_gathers == 1


@dataclass
class _Calls:
    """Stands in for the functions of ``torch.distributed``; keeps what they were given."""

    names: list[str]

    def record(self, name: str) -> Callable[..., Any]:
        def called(*_args: Any, **_options: Any) -> Any:
            self.names.append(name)
            return [] if name == "batch_isend_irecv" else None

        return called


@pytest.mark.parametrize(
    ("name", "calls"), [("all-to-all", ["all_to_all_single"]), ("p2p", ["batch_isend_irecv"])]
)
def test_an_exchange_is_one_call_whatever_it_carries(
    name: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both transports; nobody waits for a rank that has nothing point to point."""
    seen = _Calls([])
    for function in ("all_to_all_single", "batch_isend_irecv", "all_gather", "P2POp"):
        record = seen.record(function) if function != "P2POp" else lambda *args: args
        monkeypatch.setattr(dist, function, record)
    transport = transports.make_transport(name, 4, torch.device("cpu"))
    memory = torch.arange(12, dtype=torch.float32)
    cuts = {1: [memory[:3]], 2: [memory[3:5]], 3: [memory[5:]]}
    transport.start(cuts, {p: [m.clone()] for p, [m] in cuts.items() if p == 2}, torch.float32)
    assert seen.names == calls
    assert transport.sent_bytes == 12 * ITEM_BYTES and transport.received_bytes == 2 * ITEM_BYTES
    seen.names.clear()
    transport.start({}, {}, torch.float32)
    assert seen.names == (calls if name == "all-to-all" else [])


def test_messages_with_gaps_between_them_are_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-to-all-v sends one run of memory: a gap would shift what follows it."""
    monkeypatch.setattr(dist, "all_to_all_single", lambda *args, **options: None)
    transport = transports.make_transport("all-to-all", 4, torch.device("cpu"))
    memory = torch.zeros(12)
    with pytest.raises(AssertionError, match="follow each other"):
        transport.start({1: [memory[:3]], 2: [memory[4:]]}, {}, torch.float32)


# --- the floor of a node -----------------------------------------------------------------------


def elements(params: Mapping[str, Array]) -> set[int]:
    """Every element of the model has a number of its own."""
    found: set[int] = set()
    for array in params.values():
        found.update(array.ravel().tolist())
    return found - {PADDING}


def floor_of_node(case: Case, hf: dict[str, Array], ranks: range) -> int:
    """Bytes that some rank of a node needs and none of it holds, each counted once."""
    needed = set().union(*(elements(vllm_params(case, hf, rank)) for rank in ranks))
    held = set().union(*(elements(megatron_params(case, hf, rank)) for rank in ranks))
    return ITEM_BYTES * len(needed - held)


@given(cases())
@settings(max_examples=8, deadline=None)
@example(TIED)
@example(replace(LATENT, dp=2, ranks_per_node=3))
@example(PIPELINED_ENGINE)
@example(REDUNDANT)
@example(replace(GQA, tp=1, pp=2, dp=4, kv_heads=2, engine_tp=4, ranks_per_node=4))
def test_with_a_relay_a_node_receives_its_floor(case: Case) -> None:
    """Counted in the transport: what comes from other nodes, once per node."""
    hf = hf_arrays(case)

    def one_rank(rank: int, transport: LocalTransport) -> Mapping[int, int]:
        resharder, _, target = resharder_of(case, rank, transport, 10**9, relay=True)
        resharder.run(tensors(megatron_params(case, hf, rank)), empty(target.local_shapes(rank)))
        return transport.bytes_from

    received = LocalWorld(case.world).run(one_rank)
    for first in range(0, case.world, case.ranks_per_node):
        node = range(first, min(first + case.ranks_per_node, case.world))
        entering = sum(n for r in node for peer, n in received[r].items() if peer not in node)
        assert entering == floor_of_node(case, hf, node), node


# --- staging -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "relay"),
    [(MOE, False), (LATENT, True), (REDUNDANT, False)],
    ids=["sliced", "whole, relay", "redundant"],
)
def test_experts_are_staged_within_the_bucket(case: Case, relay: bool) -> None:
    """Every tensor that a sync makes, by a tracking allocator: the two buffers and no more."""
    case = replace(case, dp=2)
    hf = hf_arrays(case)

    def one_rank(rank: int, transport: LocalTransport) -> tuple[int, int, int]:
        resharder, _, target = resharder_of(case, rank, transport, BUCKET_BYTES, relay)
        read = tensors(megatron_params(case, hf, rank))
        write = empty(target.local_shapes(rank))
        with TensorTracker() as tracker:
            resharder.run(read, write)
        return resharder.schedule.num_rounds, resharder.staging_bytes(), tracker.peak_bytes

    for num_rounds, said, peak in LocalWorld(case.world).run(one_rank):
        assert num_rounds > 3
        assert 0 < said == peak <= BUCKET_BYTES


def whole_tensor_bytes(schedule: Schedule, source: ShardLayout, bytes_of: ElementBytes) -> int:
    """The most that lies about of tensors that have begun and are not delivered.

    A round's own copies are made while the round before it is still on its way.
    """
    change = [0] * (schedule.num_rounds + 2)
    for number, names in enumerate(schedule.completed):
        for name in names:
            shape, size = source.shape_of(name), bytes_of(name)
            for length in shape:
                size *= length
            first = schedule.slots_of(source, name)[0].round
            change[max(0, first - 1)] += size
            change[number + 1] -= size
    most = held = 0
    for size in change:
        held += size
        most = max(most, held)
    return most


@pytest.mark.parametrize("case", [TIED, MOE, LATENT], ids=["dense", "sliced", "whole"])
def test_a_stream_stages_within_the_bucket_besides_its_tensors(case: Case) -> None:
    """What comes on top are whole tensors that have begun to arrive."""
    case = replace(case, dp=2)
    hf = hf_arrays(case)
    source, _ = layouts_of(case)
    bytes_of = element_bytes_of(source, ITEM_BYTES)

    def one_rank(rank: int, transport: LocalTransport) -> tuple[int, int, int, int]:
        stream = TensorStream(
            source,
            range(case.world),
            rank=rank,
            ranks_per_node=case.ranks_per_node,
            transport=transport,
            dtype=torch.int32,
            bucket_bytes=BUCKET_BYTES,
        )
        read = tensors(megatron_params(case, hf, rank))
        differing: list[str] = []

        def deliver(name: str, tensor: torch.Tensor) -> None:
            if not np.array_equal(tensor.numpy(), hf[name]):
                differing.append(name)

        with TensorTracker() as tracker:
            stream.run(read, deliver)
        assert not differing
        schedule = stream.resharder.schedule
        whole = whole_tensor_bytes(schedule, source, bytes_of)
        return schedule.num_rounds, stream.resharder.staging_bytes(), whole, tracker.peak_bytes

    for num_rounds, said, whole, peak in LocalWorld(case.world).run(one_rank):
        assert num_rounds > 3
        assert 0 < said <= BUCKET_BYTES
        assert said < peak <= said + whole


# --- aliasing ----------------------------------------------------------------------------------


def moved(case: Case, many_messages: bool) -> list[dict[str, torch.Tensor]]:
    """The engine's parameters of all ranks after a sync in several rounds."""
    hf = hf_arrays(case)

    def one_rank(rank: int, transport: LocalTransport) -> dict[str, torch.Tensor]:
        transport.many_messages = many_messages
        resharder, _, target = resharder_of(case, rank, transport, BUCKET_BYTES)
        write = empty(target.local_shapes(rank))
        resharder.run(tensors(megatron_params(case, hf, rank)), write)
        return write

    return LocalWorld(case.world).run(one_rank)


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

    monkeypatch.setattr(exchange, "ALONE_BYTES", 64)
    monkeypatch.setattr(torch.Tensor, "view", contiguous_first)
    hf = hf_arrays(case)
    for rank, written in enumerate(moved(case, many_messages)):
        for name, wanted in vllm_params(case, hf, rank).items():
            np.testing.assert_array_equal(written[name].numpy(), wanted, f"{rank} {name}")
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
        moved(GQA, many_messages=False)
