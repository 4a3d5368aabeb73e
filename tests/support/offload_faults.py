"""Errors planted in the middle of switches of a real trainer's memory."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from support.handover import hand_over
from support.line_faults import Planted, fault_before_line
from support.table_engine import CompareWeights, CopyWeights, TableEngine, first_table

from mindspeed_rl.colocation import host_pool, packed
from mindspeed_rl.colocation import storage_group as group
from mindspeed_rl.colocation.scheduler import ColocationPlan, DeviceScheduler, Phase
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.platforms import storages
from mindspeed_rl.weights.sync import WeightSync

FILES = (group, host_pool, packed, storages)
# Loops over tensors run the same lines again and again.
STRIDE = 31


def fail_everywhere(sharing: ColocationPlan) -> tuple[int, list[str]]:
    """Switch there and back again and again, each time with an error further on. Local.

    The engine's side is a double. Afterwards the machine is led back to TRAIN.

    Returns:
        How many errors were planted, and what was not as before after one of them.
    """
    engine = TableEngine()
    sync = WeightSync(
        cast(Any, CopyWeights()), cast(Any, CompareWeights()), lambda: {"table": first_table()}, 0
    )
    sharing.leave_all()
    phases = DeviceScheduler(engine, lambda name: nullcontext(), sharing)
    phases.to_train()
    expected, _ = _look(sharing)

    def switch(number: int) -> list[str]:
        with (
            fault_before_line(number, FILES) as lines,
            nullcontext() if not number else suppress(Planted),
        ):
            hand_over(phases, sync, engine, number)
            phases.to_train()
        return lines

    count, wrong = len(switch(0)), []
    numbers = range(1, count, STRIDE)
    for number in numbers:
        line = switch(number)[-1]
        at = f"{line} ({phases.state.value})"
        if phases.state is not Phase.TRAIN:
            phases.to_train()
        contents, away = _look(sharing)
        wrong += [f"{owner} is away after {at}" for owner in away]
        for owner, tensors in contents.items():
            pairs = zip(tensors, expected[owner], strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                wrong.append(f"{owner} changed after {at}")
    return len(numbers), wrong


def _look(
    sharing: ColocationPlan,
) -> tuple[dict[MemoryOwner, list[torch.Tensor]], list[MemoryOwner]]:
    """Copies of what the owners hold in TRAIN, and those that are away although they should not."""
    visitors = sharing.leaving(MemoryOwner.REFERENCE)
    away = [o for o, g in sharing.groups.items() if not g.resident and g not in visitors]
    for found in visitors:
        found.restore()
    contents = {
        owner: [t.detach().clone() for t in found._find()]
        for owner, found in sharing.groups.items()
        if owner is not MemoryOwner.GRAD_BUFFERS
    }
    for found in visitors:
        found.release()
    return contents, away
