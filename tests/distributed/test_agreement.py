"""What all ranks must come to know alike: samples, plans, the size of a node. Two gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
from support.spawn import run_ranks

from mindspeed_rl.core.types import Completion, Prompt, Rollout
from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Row = tuple[int, int, int, bool, int, int, float]


@dataclass(slots=True)
class Facts:
    """What one rank saw."""

    both: list[Row] = field(default_factory=list)
    mirrored: list[Row] = field(default_factory=list)
    lost: str = ""
    gathered: list[bytes] = field(default_factory=list)
    unequal_nodes: str = ""
    cache_bytes: int = 0


def rollout(i: int) -> Rollout:
    """A response of ``i`` tokens."""
    reason = "stop" if i % 2 else "length"
    completion = Completion((2**20 + i,) * i, (-0.5 * i,) * i, reason, 7)
    return Rollout(i, Prompt(2**33 + i, (1,), "", ""), completion, i / 3, {"math": float(i)})


def rows(samples: object) -> list[Row]:
    from mindspeed_rl.samples.rollout_info import RolloutInfo, SampleKey

    assert isinstance(samples, list)
    result = []
    for s in samples:
        assert isinstance(s, RolloutInfo) and s.parts == (float(s.sample_id),)
        assert s.key == SampleKey(2, 4 + s.sample_id) and s.num_sampled == s.num_tokens
        result.append(
            (s.sample_id, s.prompt_index, s.num_tokens, s.stopped, s.weights_version, s.group,
             s.reward)
        )  # fmt: skip
    return result


def agreement_world(world: World) -> Facts:
    """Rank 0 has the samples 0 and 3, rank 1 the others; then rank 0 has all; then one is lost."""
    import torch

    from mindspeed_rl.parallel.groups import check_equal_nodes
    from mindspeed_rl.rl.build_engine import agreed_cache_bytes
    from mindspeed_rl.samples.rollout_info import SampleKey, exchange_table
    from mindspeed_rl.weights.transports import AllToAllTransport

    facts, first, key = Facts(), world.rank == 0, SampleKey(2, 4)
    mine = [rollout(i) for i in ((3, 0) if first else (4, 1, 2))]
    facts.both = rows(exchange_table(mine, world.rank, ("math",), 5, key))
    alone = [rollout(i) for i in range(5)] if first else []
    facts.mirrored = rows(exchange_table(alone, world.rank, ("math",), 5, key))
    with pytest.raises(RuntimeError) as error:
        exchange_table(mine[: 2 if first else 1], world.rank, ("math",), 5, key)
    facts.lost = str(error.value)
    transport = AllToAllTransport(2, torch.device("cpu"), None)
    facts.gathered = transport.all_gather(bytes([world.rank, 255, 0]))
    check_equal_nodes(2)
    with pytest.raises(ValueError) as refusal:
        check_equal_nodes(8 if first else 4)
    facts.unequal_nodes = str(refusal.value)
    facts.cache_bytes = agreed_cache_bytes(1.0 if first else 2.0)
    return facts


def test_all_ranks_know_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(agreement_world, 2, work_dir=tmp_path)
    assert first == second
    single = [float(numpy.float32(i / 3)) for i in range(5)]
    facts = [(i, 2**33 + i, i, i % 2 == 1, 7) for i in range(5)]
    assert first.both == [
        (*f, int(f[0] not in (0, 3)), r) for f, r in zip(facts, single, strict=True)
    ]
    assert first.mirrored == [(*f, 0, r) for f, r in zip(facts, single, strict=True)]
    assert first.lost == "rollouts of this step: 3 arrived, 5 expected; missing [1, 2]"
    assert first.cache_bytes == 1 << 30, "nodes of unlike flags have caches of one size"
    assert first.gathered == [b"\x00\xff\x00", b"\x01\xff\x00"]
    assert "(1 ranks on nodes of 4, 1 ranks on nodes of 8)" in first.unequal_nodes
    assert "the same --nproc-per-node on every node" in first.unequal_nodes
