"""Creates megatron-core's process groups and random states and checks them against the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import ModuleType

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mindspeed_rl.core.groups import context_group_name
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.parallel.groups import check_group
from mindspeed_rl.platforms.process_groups import process_groups

#: By size: this rank's groups of neighbours along context parallelism, where a layout has several.
_context_groups: dict[int, dist.ProcessGroup] = {}
#: This rank's groups that :func:`initialize` created, in the order of their creation.
_created: list[dist.ProcessGroup] = []


def forget() -> None:
    """Destroy the groups of :func:`initialize`, so that another layout can be initialized.

    megatron-core only drops its references to them, and torch keeps a group, with its
    communicators, until it is destroyed. Groups of others stay. Collective: the world; groups are
    destroyed in the order in which all ranks created them.
    """
    parallel_state.destroy_model_parallel()
    _context_groups.clear()
    for group in _created:
        dist.destroy_process_group(group)
    _created.clear()


def initialize(layout: ParallelLayout, seed: int, timeout_minutes: int) -> None:
    """Create megatron-core's groups and seed its parallel random states. Collective: the world.

    Args:
        layout: Training layout.
        seed: Seed of the run.
        timeout_minutes: Limit of one collective.
    """
    before = set(process_groups())
    vpp = layout.stages.vpp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=False,
    )
    check_group(layout, "tp", parallel_state.get_tensor_model_parallel_group())
    check_group(layout, "pp", parallel_state.get_pipeline_model_parallel_group())
    check_group(layout, "cp", parallel_state.get_context_parallel_group())
    check_group(layout, "dp", parallel_state.get_data_parallel_group())
    check_group(layout, "ep", parallel_state.get_expert_model_parallel_group())
    check_group(layout, "etp", parallel_state.get_expert_tensor_parallel_group())
    check_group(layout, "edp", parallel_state.get_expert_data_parallel_group())
    _create_context_groups(layout, timedelta(minutes=timeout_minutes))
    _created[:] = [group for group in process_groups() if group not in before]
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _create_context_groups(layout: ParallelLayout, timeout: timedelta) -> None:
    """Create the groups of neighbours that may share a row. Collective: the world.

    All ranks create all groups in one order. A row of one rank needs no group, and one of all ranks
    has megatron-core's.
    """
    rank = dist.get_rank()
    for size in layout.context_sizes[1:-1]:
        for ranks in layout.context_blocks(size):
            group = dist.new_group(
                list(ranks), timeout, group_desc=context_group_name(size).upper()
            )
            if rank in ranks:
                _context_groups[size] = group


def context_process_group(size: int) -> dist.ProcessGroup | None:
    """Return this rank's group of ``size`` neighbours that share a row; ``None``: it is alone."""
    if size == 1:
        return None
    whole: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return whole if size == whole.size() else _context_groups[size]


def group_along(axis: str) -> dist.ProcessGroup | None:
    """Return this rank's group along an axis of the training grid; ``None`` means the world."""
    if axis == "world":
        return None
    groups: dict[str, Callable[[], dist.ProcessGroup]] = {
        "dp-cp": partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
        "pp": parallel_state.get_pipeline_model_parallel_group,
        "cp": parallel_state.get_context_parallel_group,
        "tp": parallel_state.get_tensor_model_parallel_group,
    }
    return groups[axis]()


@contextmanager
def unchanged(what: str) -> Iterator[None]:
    """Check that the block does not replace groups or sizes that the trainer works with. Local.

    Raises:
        RuntimeError: Some have changed at the end of the block; the message names them.
    """
    before = _globals()
    yield
    after = _globals()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if changed:
        shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if changed[5:] else "")
        raise RuntimeError(
            f"{what} changed process groups that the trainer works with: {shown}; it must bring "
            "groups of its own"
        )


def _globals() -> dict[str, object]:
    """Return megatron-core's groups, sizes and ranks, and torch's default group."""
    found: dict[str, object] = {
        f"megatron.core.parallel_state.{name}": list(value) if isinstance(value, list) else value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__")
        if not callable(value) and not isinstance(value, ModuleType)
    }
    found["torch.distributed.group.WORLD"] = dist.group.WORLD
    return found
