"""Process groups of a rank that move tensors on the device: each has buffers of its own (R24).

Groups with equal ranks are one communicator; groups of one rank have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspeed_rl.parallel.layout import EngineLayout, ParallelLayout

# Our name of a group -> megatron-core's, where they differ.
_MEGATRON_NAMES = {"dp-cp": "dp_cp", "expert-dp": "ep_dp"}


def device_groups(
    rank: int, parallel: ParallelLayout, engine: EngineLayout | None, *, experts: bool
) -> dict[str, tuple[int, ...]]:
    """The rank's groups of more than one rank by name, each set of ranks once. Pure.

    Names of groups with equal ranks are joined with ``=``. ``experts``: whether the model has any.
    """
    at, expert = parallel.coords(rank), parallel.expert_coords(rank)
    stage = range(at.pp * parallel.ranks_per_stage, (at.pp + 1) * parallel.ranks_per_stage)

    def alike(*axes: str) -> tuple[int, ...]:
        return tuple(
            r
            for r in stage
            if all(getattr(parallel.coords(r), axis) == getattr(at, axis) for axis in axes)
        )

    def alike_experts(*axes: str) -> tuple[int, ...]:
        return tuple(
            r
            for r in stage
            if all(
                getattr(parallel.expert_coords(r), axis) == getattr(expert, axis) for axis in axes
            )
        )

    groups = {
        "world": tuple(range(parallel.world)),
        "tp": alike("cp", "dp"),
        "cp": alike("tp", "dp"),
        "dp-cp": alike("tp"),
        "pp": tuple(range(rank % parallel.ranks_per_stage, parallel.world, len(stage))),
        "mp": tuple(
            r
            for r in range(parallel.world)
            if (parallel.coords(r).cp, parallel.coords(r).dp) == (at.cp, at.dp)
        ),
    }
    if experts:
        groups |= {
            "ep": alike_experts("tp", "dp"),
            "etp": alike_experts("ep", "dp"),
            "expert-dp": alike_experts("tp", "ep"),
        }
    if engine is not None:
        first = engine.replica_of(rank) * engine.size
        inside = range(first, first + engine.size)
        peers = [r for r in inside if engine.stage_of(r) == engine.stage_of(rank)]
        groups["rollout tp"] = tuple(
            r for r in peers if engine.group_of(r) == engine.group_of(rank)
        )
        groups["rollout dp"] = tuple(r for r in peers if engine.tp_rank(r) == engine.tp_rank(rank))
        if engine.expert_parallel:
            groups["rollout ep"] = tuple(peers)
    names: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in groups.items():
        if len(ranks) > 1:
            names.setdefault(ranks, []).append(name)
    return {" = ".join(several): ranks for ranks, several in names.items()}


def hccl_lines(
    groups: Mapping[str, tuple[int, ...]], buffers_mb: Mapping[str, int], default_mb: int
) -> Iterator[str]:
    """The HCCL groups of a rank with their buffers, for the start of a run (R24). Pure.

    Args:
        groups: from :func:`device_groups`.
        buffers_mb: ``--hccl-group-buffer``, by megatron-core's names.
        default_mb: ``HCCL_BUFFSIZE``.
    """
    total = 0
    for name, ranks in groups.items():
        parts = [_MEGATRON_NAMES.get(part, part) for part in name.split(" = ")]
        size = max((buffers_mb[part] for part in parts if part in buffers_mb), default=default_mb)
        total += 2 * size
        yield f"hccl group {name}: {len(ranks)} ranks, 2 x {size} MiB"
    yield (
        f"hccl groups of rank 0: {len(groups)}, {total} MiB of buffers outside torch's allocator "
        "once each of them was used; none is built by this project beside those of megatron-core "
        "and the engine"
    )
