"""The kind of context parallelism, from Megatron's and MindSpeed's flags."""

from __future__ import annotations

import math

from mindspeed_rl.config.model import ParallelConfig
from mindspeed_rl.core.context_parallelism import CP_ALGORITHMS, GATHERED, ContextParallelism
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.layers import GroupedQueryAttention, LatentAttention


def context_parallelism(parallel: ParallelConfig) -> ContextParallelism:
    """Return the kind of context parallelism that the flags ask for. Pure.

    Raises:
        UsageError: Flags contradict each other, or sizes do not fit the context-parallel size.
    """
    kind, size = _kind(parallel), parallel.context_parallel_size
    given = _hybrid_size(parallel)
    if kind != "a2a+p2p" and given is not None:
        raise UsageError(
            f"{given[0]} is read with --cp-comm-type a2a+p2p (--context-parallel-algo "
            f"hybrid_cp_algo), not with {kind}; remove it, or choose that kind"
        )
    if size == 1 or kind == "all_gather":
        return ContextParallelism(kind)
    if kind == "p2p":
        return ContextParallelism(kind, ring=size)
    if kind == "a2a":
        return ContextParallelism(kind, ulysses=size)
    if given is None:
        raise UsageError(
            "--cp-comm-type a2a+p2p needs the ranks that exchange tokens for heads: "
            "--hierarchical-context-parallel-sizes A P with A x P = --context-parallel-size "
            f"{size}, or --ulysses-degree-in-cp A; add one"
        )
    return ContextParallelism(kind, ulysses=given[1], ring=size // given[1])


def _kind(parallel: ParallelConfig) -> str:
    types, algorithm = parallel.cp_comm_type, parallel.context_parallel_algo
    if len(set(types)) > 1:
        raise UsageError(
            f"--cp-comm-type {' '.join(types)}: all layers have one kind; give one value"
        )
    of_algorithm = CP_ALGORITHMS.get(algorithm)
    if types and of_algorithm and of_algorithm != types[0]:
        raise UsageError(
            f"--cp-comm-type {types[0]} and --context-parallel-algo {algorithm} ({of_algorithm}) "
            "ask for different kinds of context parallelism; remove one"
        )
    return types[0] if types else of_algorithm or GATHERED.kind


def _hybrid_size(parallel: ParallelConfig) -> tuple[str, int] | None:
    """Return the flag of a hybrid's sizes as typed, and how many ranks exchange heads."""
    size, found = parallel.context_parallel_size, []
    if sizes := parallel.hierarchical_context_parallel_sizes:
        typed = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
        if len(sizes) != 2 or math.prod(sizes) != size:
            raise UsageError(
                f"{typed}: allowed are two sizes whose product is --context-parallel-size {size}: "
                "ranks that exchange tokens for heads, and ranks of a ring"
            )
        found.append((typed, sizes[0]))
    if degree := parallel.ulysses_degree_in_cp:
        typed = f"--ulysses-degree-in-cp {degree}"
        if size % degree:
            raise UsageError(f"{typed}: must divide --context-parallel-size {size}")
        found.append((typed, degree))
    if len({degree for _, degree in found}) > 1:
        raise UsageError(f"{found[0][0]} and {found[1][0]} differ; remove one")
    return found[0] if found else None


def check_heads(
    parallel: ParallelConfig, attention: GroupedQueryAttention | LatentAttention
) -> None:
    """Refuse a kind that cannot share out the heads of a model.

    Raises:
        UsageError: Ranks that exchange tokens for heads do not divide the query heads of a rank.
    """
    ranks, tp = context_parallelism(parallel).ulysses, parallel.tensor_model_parallel_size
    heads = attention.num_heads // tp
    if heads % ranks:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0]
        raise UsageError(
            f"{ranks} context-parallel ranks exchange tokens for heads (a2a), and do not divide "
            f"the {heads} query heads of a tensor-parallel rank; allowed here: "
            f"{', '.join(map(str, fitting))}; take --cp-comm-type all_gather or p2p, or a2a+p2p "
            "with --hierarchical-context-parallel-sizes"
        )


def check_dropout(parallel: ParallelConfig, attention_dropout: float) -> None:
    """Refuse dropout where keys travel: each rank would draw it for a part of the weights.

    Raises:
        UsageError: The kind has a ring.
    """
    if attention_dropout and context_parallelism(parallel).ring > 1:
        raise UsageError(
            f"--attention-dropout {attention_dropout:g} with context parallelism in a ring: "
            "allowed is 0; remove it, or take --cp-comm-type all_gather or a2a"
        )
