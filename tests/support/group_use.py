"""Which process groups a trainer uses: watched while it takes a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.launch.bootstrap import World


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.startswith("c10d::"):
            self.found |= {known for value in args if (known := _group(value))}
        return func(*args, **kwargs or {})


def _group(value: object) -> tuple[str, tuple[int, ...]] | None:
    """Name and ranks of an argument that is a group of more than one rank."""
    if "ProcessGroup" not in str(getattr(value, "_type", lambda: "")()):
        return None
    group = dist.ProcessGroup.unbox(value)  # type: ignore[attr-defined]
    ranks = tuple(dist.get_process_group_ranks(group))
    name = "world" if group is dist.group.WORLD else group.group_desc.lower()
    return (name, ranks) if len(ranks) > 1 else None


@contextmanager
def watched_groups() -> Iterator[set[tuple[str, tuple[int, ...]]]]:
    """Yields (name, ranks) of every group of more than one rank that a collective runs on."""
    with _Watch() as watch:
        yield watch.found


def used_groups_world(
    world: World, layout: Sequence[str], model: str
) -> tuple[set[tuple[str, tuple[int, ...]]], set[tuple[str, tuple[int, ...]]]]:
    """Groups that this rank uses in an RL update, and those that are predicted."""
    from support.training_worlds import Case, make_job, make_samples, run_case

    from mindspeed_rl.building.models import build_engine, initialize_parallel
    from mindspeed_rl.core.groups import MEGATRON_GROUPS
    from mindspeed_rl.planning.prediction import MemoryPrediction
    from mindspeed_rl.platforms.process_groups import existing_groups

    job = make_job(world, model, [*layout, "--lr", "1e-3"])
    with watched_groups() as used:
        initialize_parallel(job)
        engine = build_engine(job, "policy", 1)
        run_case(job, engine, Case("step", loss="on-policy", num_steps=1), make_samples(67))
    there = {(group.name, group.ranks) for group in existing_groups()}
    assert used <= there
    predicted = {
        (MEGATRON_GROUPS.get(name, name), ranks)
        for name, ranks in MemoryPrediction(job.config, job.plan).groups(world.rank).items()
        if not name.startswith("rollout")
    }
    return used, predicted
