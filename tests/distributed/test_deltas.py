"""Real ranks whose syncs move only what changed hold the bits that whole weights would leave.

Four gloo ranks train whole experts, and their engine cuts every expert by tensor parallelism. What
each engine rank must hold comes from ``support.layout_oracle``; the proof is the product's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import layouts_of
from support.layout_oracle import megatron_params, vllm_params
from support.spawn import run_ranks

from mindspeed_rl.engines.vllm.engine_memory import ZeroedMemory
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.platforms.kept_memory import KeptMemory
from mindspeed_rl.platforms.storages import as_bytes, storages_of
from mindspeed_rl.weights.transports import Pending, Tensors, Transport

pytestmark = pytest.mark.distributed

QWEN_30B = Case(
    num_layers=2, hidden=64, ffn=24, kv_heads=2, heads_per_group=4, head_dim=8, vocab=96,
    tied=False, qk_norm=True, experts=16, expert_ffn=32, moe_layers=(True,) * 2, tp=1, pp=2, cp=1,
    dp=2, vocab_divisor=8, ep=2, etp=1, engine_tp=4, ranks_per_node=4,
)  # fmt: skip
ODD = 2  # the rank whose engine or copies go wrong
WAYS = ("p2p", "all-to-all")
BUCKET_BYTES = 64 << 10  # several rounds


class PlainEngine:
    """An engine that is its weights, which sleep between updates."""

    keeps_bits = True

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.weights_version = -1
        self.weights = {
            name: torch.full(shape, -1, dtype=torch.int16).view(torch.bfloat16)
            for name, shape in shapes.items()
        }
        tensors = self.weights.values()
        self.memory = KeptMemory(ZeroedMemory(tensors), tensors, CpuPlatform())

    def sleep(self) -> None:
        """Free the weights; their bits are on the host alone."""
        self.memory.free()
        for storage in storages_of(self.weights.values()):
            assert not storage.nbytes() or not as_bytes(storage).any()

    def weight_views(self) -> Mapping[str, torch.Tensor]:
        return self.weights

    def begin_update(self) -> None:
        self.weights_version = -1

    def finish_update(self, version: int) -> None:
        self.weights_version = version


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of one sync.

    Attributes:
        wrong: engine parameters that differ from the oracle's.
        share: bytes received of those of all weights.
        lines: what was told.
        error: of the proof; empty: none.
    """

    wrong: list[str]
    share: float
    lines: list[str]
    error: str


class DamagingTransport:
    """A transport of which one message arrives damaged, when it is told so.

    Attributes:
        damages: element type of the message: int32 for heads, uint8 for codes; ``None``: none.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.many_messages, self.device = transport.many_messages, transport.device
        self.all_gather = transport.all_gather
        self.damages: torch.dtype | None = None
        self._left_alone = 0

    def damage(self, dtype: torch.dtype) -> None:
        """Damage something in the second exchange of this type that brings this rank anything."""
        self.damages, self._left_alone = dtype, 1

    def start(self, sends: Tensors, receives: Tensors, dtype: torch.dtype) -> Pending:
        pending = self._transport.start(sends, receives, dtype)
        if dtype != self.damages or not receives:
            return pending
        if self._left_alone:
            self._left_alone -= 1
            return pending
        self.damages = None
        return DamagedPending(pending, next(iter(receives.values()))[0])


@dataclass(frozen=True, slots=True)
class DamagedPending:
    """What is received is not what was sent: one bit of a head, or all bits of a code."""

    pending: Pending
    message: torch.Tensor

    def wait(self) -> None:
        self.pending.wait()
        if self.message.dtype == torch.int32:
            self.message[0] ^= 1  # a number of changed words that is possible, too
        else:
            self.message.fill_(255)


def bits(array: Array) -> torch.Tensor:
    """Numbers of elements as bits of bfloat16, those of NaN and -0.0 among them."""
    return torch.from_numpy(array.astype(np.int16)).view(torch.bfloat16)


def updated(hf: dict[str, Array], seed: int) -> dict[str, Array]:
    """A model of which one word in a hundred moved by one."""
    draws = np.random.default_rng(seed)
    return {n: a + (draws.random(a.shape) < 0.01).astype(a.dtype) for n, a in hf.items()}


def delta_world(world: World, way: str) -> list[Seen]:
    """A sync after each update; before some of them an engine or a copy goes wrong."""
    from mindspeed_rl.deltas.path import DeltaResharder, delta_path
    from mindspeed_rl.weights.executor import Resharder
    from mindspeed_rl.weights.sync import WeightSync, versions_of_ranks
    from mindspeed_rl.weights.transports import make_transport
    from mindspeed_rl.weights.verify import WeightVerifier

    source, target = layouts_of(QWEN_30B)
    plain = make_transport(way, world.size, torch.device("cpu"))
    resharder = Resharder(
        source,
        target,
        rank=world.rank,
        ranks_per_node=world.size,
        transport=(transport := DamagingTransport(plain)),
        dtype=torch.bfloat16,
        bucket_bytes=BUCKET_BYTES,
    )
    lines: list[str] = []
    deltas = DeltaResharder(resharder, world.rank, torch.device("cpu"), lines.append)
    hf = hf_arrays(QWEN_30B)
    read: dict[str, torch.Tensor] = {}
    sync = WeightSync(
        delta_path(deltas),
        WeightVerifier(source, target, world.rank, torch.bfloat16),
        lambda: read,
        1,
        gather_versions=versions_of_ranks,
        log=lines.append,
    )
    engine = PlainEngine(target.local_shapes(world.rank))

    def restart() -> None:
        engine.__init__(target.local_shapes(world.rank))  # type: ignore[misc]

    def other_weights() -> None:
        restart()
        engine.weights_version = 77

    def wrong_copy() -> None:
        """A word that the next delta will not repair, as if the one before it had been lost."""
        copy = next(iter(deltas.sent.params.values()))
        copy.view(torch.int16).view(-1)[5] ^= 1

    accidents: dict[int, Callable[[], None]] = {
        4: restart,
        6: other_weights,
        8: wrong_copy,
        10: lambda: transport.damage(torch.int32),
        12: lambda: transport.damage(torch.uint8),
    }
    found = []
    for version in range(1, 14):
        if version > 1:
            hf = updated(hf, version)
        read.update({n: bits(a) for n, a in megatron_params(QWEN_30B, hf, world.rank).items()})
        engine.memory.bring_back()
        if version in accidents and world.rank == ODD:
            accidents[version]()
        lines.clear()
        error = ""
        try:
            sync.run(cast(Any, engine), version)
        except RuntimeError as problem:
            error = str(problem)
        wanted = vllm_params(QWEN_30B, hf, world.rank)
        wrong = [
            name
            for name, values in wanted.items()
            if not np.array_equal(
                np.where(values == PADDING, -1, values).astype(np.int16),
                engine.weights[name].view(torch.int16).numpy(),
            )
        ]
        engine.sleep()
        share = deltas.traffic.receive_bytes / resharder.traffic.receive_bytes
        found.append(Seen(wrong, share, list(lines), error))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_updates_leave_the_bits_of_whole_weights(way: str, tmp_path: Path) -> None:
    """After updates, a restart, foreign weights, a wrong delta that the proof found, and damage."""
    ranks = run_ranks(delta_world, 4, work_dir=tmp_path, args=(way,))
    for rank in ranks:
        for version, seen in enumerate(rank, 1):
            assert (seen.wrong, seen.error) == ([], ""), version
            if version in (10, 12):
                (line,) = seen.lines
                assert "damaged on ranks 2; all weights follow" in line, version
                assert ("CRC-32" in line) == (version == 10)
                assert ("entries where its head says" in line) == (version == 12)
                assert 1 <= seen.share < 1.1, version
            elif version in (1, 4, 6, 8):
                assert seen.share == 1 and "all weights are sent" in seen.lines[-1], version
            else:
                assert seen.share < 0.06 and seen.lines == [], version
        why = {version: rank[version - 1].lines[-1].rpartition(": ")[2] for version in (1, 4, 8)}
        assert why == {
            1: "this is the first sync",
            4: "engines do not hold what the latest sync left",
            8: "the proof found wrong weights",
        }
        assert "1 tensors (" in rank[7].lines[0] and "all weights follow" in rank[7].lines[0]
        assert "ranks 2 (1 of 4) hold weights of version none" in rank[3].lines[0]
        assert "ranks 2 (1 of 4) hold weights of version 77" in rank[5].lines[0]
