"""Ranks plan alone, so they compare their plans before anything moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.layout_cases import GQA, layouts_of
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.weights.executor import Resharder

CASE = replace(GQA, tp=1, pp=2, dp=2, engine_tp=2)
USUAL: dict[str, Any] = {"ranks_per_node": 4, "dtype": torch.float32, "bucket_bytes": 1 << 20}


def plan(rank: int, transport: LocalTransport, **changes: Any) -> Resharder:
    source, target = layouts_of(replace(CASE, **changes.pop("case", {})))
    return Resharder(source, target, rank=rank, transport=transport, **(USUAL | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks_per_node": 2},
        {"dtype": torch.bfloat16},
        {"bucket_bytes": 10**9},
        {"case": {"engine_tp": 4}},
        {"case": {"vocab_divisor": 1, "hidden": 4}},
    ],
    ids=["ranks per node", "precision", "bucket", "engine layout", "model"],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_with_another_plan_are_named_on_all_ranks(changes: dict[str, Any], odd: int) -> None:
    def one_rank(rank: int, transport: LocalTransport) -> str:
        resharder = plan(rank, transport, **(dict(changes) if rank == odd else {}))
        with pytest.raises(RuntimeError, match="have another plan") as error:
            resharder.run({}, {})
        return str(error.value)

    told = LocalWorld(4).run(one_rank)
    assert len(set(told)) == 1
    assert f"ranks [{odd}] of 4 have another plan than the rest" in told[0]
