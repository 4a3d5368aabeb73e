"""What all ranks must come to know alike: plans, the size of a node, of a cache. Two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spawn import run_ranks

from mindspeed_rl.launch.bootstrap import World

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def agreement_world(world: World) -> tuple[list[bytes], int, str]:
    """Rank function: gathered bytes, the agreed size of the cache, the refusal of unlike nodes."""
    import torch

    from mindspeed_rl.building.engine import agreed_cache_bytes
    from mindspeed_rl.parallel.groups import check_equal_nodes
    from mindspeed_rl.weights.transports import AllToAllTransport

    transport = AllToAllTransport(2, torch.device("cpu"), None)
    gathered = transport.all_gather(bytes([world.rank, 255, 0]))
    check_equal_nodes(2)
    with pytest.raises(ValueError) as refusal:
        check_equal_nodes(4 if world.rank else 8)
    return gathered, agreed_cache_bytes(1.0 + world.rank), str(refusal.value)


def test_all_ranks_know_the_same(tmp_path: Path) -> None:
    """Of samples: ``tests/unit/samples/test_sample_table.py``, and every run on two ranks."""
    first, second = run_ranks(agreement_world, 2, work_dir=tmp_path)
    assert first == second
    gathered, cache_bytes, refusal = first
    assert gathered == [b"\x00\xff\x00", b"\x01\xff\x00"]
    assert cache_bytes == 1 << 30, "nodes of unlike flags have caches of one size"
    assert "(1 ranks on nodes of 4, 1 ranks on nodes of 8)" in refusal
    assert "the same --nproc-per-node on every node" in refusal
