"""Lists the process groups of this process, whichever library created them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NAMELESS = "undefined"  # torch's description of a group without a name


@dataclass(frozen=True, slots=True)
class ExistingGroup:
    """One process group of this rank.

    Attributes:
        name: Description given by its creator; groups of vLLM, which gives none, are ``engine``.
        ranks: Global ranks of the group.
        backend: Backend as given to ``new_group``.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str


def process_groups() -> list[dist.ProcessGroup]:
    """Return torch's groups that this rank is in, in the order of their creation. Local.

    torch has no public list of them.
    """
    return list(distributed_c10d._world.pg_map)


def existing_groups() -> list[ExistingGroup]:
    """Describe all groups that this rank is in, in the order of their creation. Local."""
    found = []
    for group in process_groups():
        ranks = tuple(dist.get_process_group_ranks(group))
        name = "world" if group is dist.group.WORLD else group.group_desc.lower()
        name = "engine" if name == _NAMELESS else name
        config = distributed_c10d._world.pg_backend_config.get(group, "")
        found.append(ExistingGroup(name, ranks, str(config) or dist.get_backend(group)))
    return found


def group_lines(
    groups: Sequence[ExistingGroup], buffer_bytes: Mapping[str, int], *, listed: bool
) -> Iterator[str]:
    """Yield log lines about the groups of more than one rank, with equal groups in one line.

    Args:
        groups: All groups of one rank.
        buffer_bytes: Predicted device buffers in bytes, by the name of each group that a step uses.
        listed: Whether the groups have lines; else there is one about buffers, if there are any.
    """
    total = sum(buffer_bytes.values()) / 2**20
    sizes = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in buffer_bytes.items())
    if not listed:
        if total:
            yield f"device buffers of process groups: {total:.0f} MiB, of those in use: {sizes}"
        return
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for group in groups:
        if len(group.ranks) > 1:
            alike.setdefault((group.ranks, group.backend), []).append(group.name)
    several = sum(len(names) for names in alike.values())
    yield f"process groups of this rank: {len(groups)}, {several} of more than one rank"
    for (ranks, backend), names in alike.items():
        yield f"  {_ranks(ranks)} {backend}: {', '.join(names)}"
    yield f"  device buffers: {total:.0f} MiB" + (f", of groups in use: {sizes}" if sizes else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks, those at equal distances as first-last/step."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))
