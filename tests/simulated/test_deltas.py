"""Syncs of all ranks of random layouts that move only what changed, against slicing by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import GQA, MOE, REDUNDANT, SLICED, TIED, cases, layouts_of
from support.layout_oracle import megatron_params, vllm_params
from support.local_reshard import UNTOUCHED, smallest_bucket, tensors
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.deltas import codec, messages
from mindspeed_rl.deltas.path import DeltaResharder
from mindspeed_rl.weights.executor import Resharder
from mindspeed_rl.weights.transports import Tensors


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync to the version of its index.

    Attributes:
        share: of the words of the model that changed since the one before.
        held: versions that engines claim to hold, by rank, where not the latest finished one.
        repacks: ranks whose engine keeps other bits.
        why_all: reason to move all.
        loses: ranks to which it does not come, so that no rank is told that it is finished.
    """

    share: float
    held: tuple[tuple[int, int], ...] = ()
    repacks: tuple[int, ...] = ()
    why_all: str = ""
    loses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank saw of a sync.

    Attributes:
        wrong: parameters that differ from the oracle's.
        sent: bytes that left.
        received: bytes that came.
        all_received: bytes that come where all is moved.
        words: words that were coded here.
        line: what was told.
    """

    wrong: tuple[str, ...]
    sent: int
    received: int
    all_received: int
    words: int
    line: str


def changed(hf: dict[str, Array], share: float, seed: int) -> dict[str, Array]:
    """The model with other words, most of them by one."""
    draws = np.random.default_rng(seed)
    return {
        name: array
        + np.where(
            draws.random(array.shape) < share, draws.choice((-1, 1, 1, -7), array.shape), 0
        ).astype(array.dtype)
        for name, array in hf.items()
    }


def run_syncs(
    case: Case, syncs: Sequence[Sync], dtype: torch.dtype, *, tight: bool, many: bool
) -> list[list[Moved]]:
    """What each rank saw of each sync."""
    source, target = layouts_of(case)
    bucket = smallest_bucket(case, source, target, relay=False) if tight else 10**9
    models = [hf_arrays(case)]
    for number, sync in enumerate(syncs[1:]):
        models.append(changed(models[-1], sync.share, number))

    def one_rank(rank: int, transport: LocalTransport) -> list[Moved]:
        transport.many_messages = many
        resharder = Resharder(
            source, target, rank=rank, ranks_per_node=case.ranks_per_node, transport=transport,
            dtype=dtype, bucket_bytes=bucket,
        )  # fmt: skip
        lines: list[str] = []
        deltas = DeltaResharder(resharder, rank, torch.device("cpu"), lines.append)
        shapes = target.local_shapes(rank)
        write = {n: torch.full(shape, UNTOUCHED, dtype=dtype) for n, shape in shapes.items()}
        found, left = [], -1
        for version, (hf, sync) in enumerate(zip(models, syncs, strict=True)):
            read = {n: t.to(dtype) for n, t in tensors(megatron_params(case, hf, rank)).items()}
            held = [dict(sync.held).get(r, left) for r in range(case.world)]
            if held[rank] != left or rank in sync.repacks:
                for tensor in write.values():
                    tensor.fill_(UNTOUCHED)
            before, lines[:] = (transport.sent_bytes, transport.received_bytes), []
            deltas.agree(held, rank not in sync.repacks, sync.why_all)
            deltas.run(read, write)
            if rank in sync.loses:
                for tensor in write.values():
                    tensor.fill_(UNTOUCHED)
            if not sync.loses:
                deltas.finished(left := version)
            wrong = [
                name
                for name, values in vllm_params(case, hf, rank).items()
                if not np.array_equal(
                    np.where(values == PADDING, UNTOUCHED, values).astype(shown(dtype)),
                    write[name].numpy(),
                )
            ]
            traffic = deltas.traffic
            assert traffic.send_bytes == transport.sent_bytes - before[0]
            assert traffic.receive_bytes == transport.received_bytes - before[1]
            found.append(
                Moved(
                    tuple(wrong),
                    traffic.send_bytes,
                    traffic.receive_bytes,
                    resharder.traffic.receive_bytes,
                    deltas.counts.words,
                    "".join(lines),
                )
            )  # fmt: skip
        return found

    return LocalWorld(case.world).run(one_rank)


def shown(dtype: torch.dtype) -> type:
    """The type of numpy."""
    return np.int16 if dtype is torch.int16 else np.int32


ACCIDENTS = {
    "skewed": lambda rank: Sync(0.1, held=((rank, 0),)),
    "restarted": lambda rank: Sync(0.1, held=((rank, -1),)),
    "repacks": lambda rank: Sync(0.1, repacks=(rank,)),
    "loaded": lambda rank: Sync(0.1, why_all="loaded"),
    "lost": lambda rank: Sync(0.1, loses=(rank,)),
    "none": lambda rank: Sync(0.1),
}
Accident = tuple[str, int]


@given(
    cases(),
    st.booleans(),
    st.sampled_from((torch.int16, torch.int32)),
    st.lists(st.tuples(st.sampled_from([*ACCIDENTS]), st.integers(0, 63)), max_size=2),
)
@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@example(GQA, True, torch.int32, [("skewed", 1), ("none", 0)])
@example(TIED, False, torch.int16, [("restarted", 2)])
@example(MOE, True, torch.int16, [("lost", 3), ("lost", 1)])
@example(SLICED, False, torch.int16, [("repacks", 5)])
@example(REDUNDANT, True, torch.int16, [("loaded", 0)])
def test_changes_leave_what_whole_weights_would(
    case: Case, tight: bool, dtype: torch.dtype, accidents: list[Accident]
) -> None:
    """Several updates after each other, on all ranks, with every message coded in small pieces.

    A rank that has not what the update before left gets all of its weights, with a line.
    """
    drawn = [ACCIDENTS[kind](number % case.world) for kind, number in accidents]
    syncs = [Sync(1.0, why_all="first"), Sync(0.3), *drawn, Sync(0.01)]
    with (
        mock.patch.object(messages, "LEAST_BYTES", 1),
        mock.patch.object(codec, "PIECE_WORDS", 301),
    ):
        found = run_syncs(case, syncs, dtype, tight=tight, many=not tight)
    for number, sync in enumerate(syncs):
        after_a_loss = number > 0 and bool(syncs[number - 1].loses)
        odd = {rank for rank, _ in sync.held} | {*sync.repacks}
        for rank, moved in enumerate(of_rank[number] for of_rank in found):
            assert rank in sync.loses or moved.wrong == (), (number, rank)
            dense = after_a_loss or bool(sync.why_all)
            assert bool(moved.line) == (dense or bool(odd)), (number, moved.line)
            if dense or rank in odd:
                assert moved.received >= moved.all_received


LARGE = replace(
    SLICED, hidden=96, ffn=64, vocab=192, expert_ffn=64, ranks_per_node=8, vocab_divisor=4
)


def test_bytes_follow_what_changed() -> None:
    """Nearly none where nothing changed, no more than all of them where everything did."""
    syncs = [Sync(1.0, why_all="first"), Sync(0.01), Sync(0.0), Sync(1.0)]
    found = run_syncs(LARGE, syncs, torch.int16, tight=False, many=False)
    all_bytes = sum(of_rank[0].all_received for of_rank in found)
    moved = [sum(of_rank[i].received for of_rank in found) for i in range(4)]
    assert moved[0] == all_bytes
    assert moved[1] < 0.05 * all_bytes and moved[2] < 0.01 * all_bytes
    assert all_bytes <= moved[3] <= 1.01 * all_bytes
    assert all(not sync.wrong for of_rank in found for sync in of_rank)


def test_messages_keep_at_most_twice_the_memory_that_they_carry() -> None:
    """While they are on the way; the room that their words would have taken is free."""
    kept, start = [], LocalTransport.start

    def noting(
        self: LocalTransport, sends: Tensors, receives: Tensors, dtype: torch.dtype
    ) -> object:
        if dtype == torch.uint8:
            sent = [message for several in sends.values() for message in several]
            storages = {m.untyped_storage().data_ptr(): m.untyped_storage() for m in sent}
            kept.append((sum(s.nbytes() for s in storages.values()), sum(m.nbytes for m in sent)))
        return start(self, sends, receives, dtype)

    with mock.patch.object(LocalTransport, "start", noting):
        run_syncs(LARGE, [Sync(1.0, why_all="first"), Sync(0.01)], torch.int16, tight=False,
                  many=False)  # fmt: skip
    assert sum(sent for _, sent in kept) > 1000
    assert all(memory <= 2 * sent + 64 for memory, sent in kept), kept


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        (Sync(0.01, held=((1, -1),)), "ranks 1 do not have weights of version 1"),
        (Sync(0.01, held=((1, 0), (3, 0))), "ranks 1, 3 do not have weights of version 1"),
        (Sync(0.01, repacks=(2,)), "the engines of ranks 2 repack weights"),
        (Sync(0.01, why_all="loaded"), "all weights are sent, not only what changed: loaded"),
    ],
)  # fmt: skip
def test_a_receiver_without_the_version_gets_all_of_its_weights(sync: Sync, told: str) -> None:
    """Its weights are overwritten before. All others still get what changed."""
    found = run_syncs(
        LARGE, [Sync(1.0, why_all="first"), Sync(0.01), sync, Sync(0.01)], torch.int16,
        tight=False, many=True,
    )  # fmt: skip
    odd = {rank for rank, _ in sync.held} | set(sync.repacks)
    for rank, of_rank in enumerate(found):
        assert [s.wrong for s in of_rank] == [()] * 4
        whole = rank in odd or bool(sync.why_all)
        few = of_rank[2].received < 0.05 * of_rank[2].all_received
        assert few != whole or not of_rank[2].all_received
        assert of_rank[3].received < 0.05 * of_rank[3].all_received or not of_rank[3].all_received
        assert told in of_rank[2].line and of_rank[3].line == ""


def test_a_sync_that_was_not_finished_is_followed_by_all_weights() -> None:
    """A delta that was lost: the sender's copies are newer than what the proof has confirmed."""
    source, target = layouts_of(LARGE)

    def one_rank(rank: int, transport: LocalTransport) -> tuple[int, int, list[str]]:
        resharder = Resharder(
            source, target, rank=rank, ranks_per_node=8, transport=transport, dtype=torch.int16,
            bucket_bytes=10**9,
        )  # fmt: skip
        lines: list[str] = []
        deltas = DeltaResharder(resharder, rank, torch.device("cpu"), lines.append)
        hf = hf_arrays(LARGE)
        read = {n: t.short() for n, t in tensors(megatron_params(LARGE, hf, rank)).items()}
        write = {n: torch.zeros(s, dtype=torch.int16) for n, s in target.local_shapes(rank).items()}
        for version in (1, 2, 3):
            deltas.agree([1] * LARGE.world, True, "first" if version == 1 else "")
            deltas.run(read, write)
            if version == 1:
                deltas.finished(version)
        return deltas.traffic.receive_bytes, resharder.traffic.receive_bytes, lines

    for received, all_received, lines in LocalWorld(LARGE.world).run(one_rank):
        assert received == all_received
        assert "do not have copies of what was sent of version 1" in lines[-1]


def test_damage_on_one_rank_brings_all_weights_to_all() -> None:
    """A head of which one bit changed; the next sync is of changes again, on all ranks."""
    syncs = [Sync(1.0, why_all="first"), Sync(0.01), Sync(0.01), Sync(0.01)]
    sound, number = codec.PieceHead.of_row, [0]

    def damaged(row: Sequence[int], num_words: int) -> codec.PieceHead:
        number[0] += 1
        wrong = (row[0] ^ 1, *row[1:]) if number[0] == 20 else row
        return sound(wrong, num_words)

    with mock.patch.object(codec.PieceHead, "of_row", damaged):
        found = run_syncs(LARGE, syncs, torch.int16, tight=False, many=True)
    (at,) = {i for i in range(4) if any("damaged" in of_rank[i].line for of_rank in found)}
    for of_rank in found:
        assert [sync.wrong for sync in of_rank] == [()] * 4
        assert "arrived damaged on ranks" in of_rank[at].line and at > 0
        for i in {1, 2, 3} - {at}:
            assert of_rank[i].received < 0.05 * of_rank[i].all_received and not of_rank[i].line
        assert of_rank[at].all_received <= of_rank[at].received < 1.1 * of_rank[at].all_received


def test_a_relay_is_refused() -> None:
    case = replace(GQA, ranks_per_node=2)
    source, target = layouts_of(case)

    def one_rank(rank: int, transport: LocalTransport) -> None:
        resharder = Resharder(
            source, target, rank=rank, ranks_per_node=2, transport=transport, dtype=torch.int32,
            bucket_bytes=10**9, relay=True,
        )  # fmt: skip
        DeltaResharder(resharder, rank, torch.device("cpu"), print)

    with pytest.raises(UsageError, match="--reshard-relay off"):
        LocalWorld(case.world).run(one_rank)
