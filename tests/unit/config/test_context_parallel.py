"""The kind of context parallelism, from Megatron's and MindSpeed's flags."""

from __future__ import annotations

import pytest
from support.published import published_config

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import ModelConfig, RLRunConfig
from mindspeed_rl.config.context_parallel import context_parallelism
from mindspeed_rl.config.layouts import training_layout
from mindspeed_rl.config.model import ParallelConfig
from mindspeed_rl.core.context_parallelism import ContextParallelism
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.registry import spec_from_hf_config


def flags(text: str) -> tuple[ParallelConfig, tuple[str, ...]]:
    given = ["--hf-checkpoint", "x", "--context-parallel-size", "4", *text.split()]
    parsed = parse(RLRunConfig, given, "test")
    return parsed.config.parallel, parsed.ignored


RING, ULYSSES = ContextParallelism("p2p", ring=4), ContextParallelism("a2a", ulysses=4)
HYBRID = ContextParallelism("a2a+p2p", ulysses=2, ring=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ContextParallelism("all_gather")),
        ("--cp-comm-type all_gather", ContextParallelism("all_gather")),
        ("--context-parallel-algo kvallgather_cp_algo", ContextParallelism("all_gather")),
        ("--cp-comm-type p2p p2p p2p", RING),
        ("--context-parallel-algo megatron_cp_algo", RING),
        ("--context-parallel-algo megatron_cp_algo --cp-comm-type p2p", RING),
        ("--cp-comm-type a2a", ULYSSES),
        ("--context-parallel-algo ulysses_cp_algo", ULYSSES),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", HYBRID),
        ("--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2", HYBRID),
        ("--context-parallel-size 1 --cp-comm-type a2a", ContextParallelism("a2a")),
    ],
)
def test_flags_of_both_stacks_name_a_kind(text: str, expected: ContextParallelism) -> None:
    parallel, ignored = flags(text)
    assert context_parallelism(parallel) == expected
    assert not [line for line in ignored if "context-parallel" in line]


def test_adaptive_algorithms_are_computed_as_plain_ones_and_say_so() -> None:
    parallel, ignored = flags("--context-parallel-algo adaptive_cp_algo")
    assert context_parallelism(parallel) == RING
    assert "--context-parallel-algo adaptive_cp_algo (computed as megatron_cp_algo)" in ignored
    hybrid = "--context-parallel-algo hybrid_adaptive_cp_algo"
    parallel, ignored = flags(f"{hybrid} --ulysses-degree-in-cp 2")
    assert context_parallelism(parallel) == HYBRID
    assert f"{hybrid} (computed as hybrid_cp_algo)" in ignored


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--cp-comm-type p2p a2a", ("--cp-comm-type p2p a2a", "one value")),
        (
            "--cp-comm-type a2a --context-parallel-algo megatron_cp_algo",
            ("--cp-comm-type a2a", "--context-parallel-algo megatron_cp_algo", "remove one"),
        ),
        (
            "--cp-comm-type a2a+p2p",
            ("--hierarchical-context-parallel-sizes", "--ulysses-degree-in-cp"),
        ),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            ("--hierarchical-context-parallel-sizes 4 2", "4"),
        ),
        (
            "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 3",
            ("--ulysses-degree-in-cp 3", "--context-parallel-size 4"),
        ),
        ("--ulysses-degree-in-cp 2", ("--ulysses-degree-in-cp 2", "a2a+p2p", "all_gather")),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1 "
            "--ulysses-degree-in-cp 2",
            ("--hierarchical-context-parallel-sizes 4 1", "--ulysses-degree-in-cp 2"),
        ),
    ],
)
def test_sizes_and_kinds_that_contradict_each_other(text: str, words: tuple[str, ...]) -> None:
    parallel, _ = flags(text)
    with pytest.raises(UsageError) as error:
        context_parallelism(parallel)
    assert [word for word in words if word not in str(error.value)] == []


def test_ranks_that_exchange_heads_divide_them() -> None:
    """28 heads of Qwen2.5-7B: 7 on each of four tensor-parallel ranks, or 14 on each of two."""
    spec = spec_from_hf_config(published_config("qwen2.5-7b"))

    def layout(text: str, dropout: float = 0.0) -> None:
        parallel, _ = flags(text)
        model = ModelConfig(attention_dropout=dropout)
        training_layout(model, parallel, spec, world=16)

    layout("--cp-comm-type a2a")
    for kind in ("all_gather", "p2p"):
        layout(f"--tensor-model-parallel-size 4 --cp-comm-type {kind}")
    two = "--tensor-model-parallel-size 2 --cp-comm-type"
    with pytest.raises(UsageError, match=r"14 query heads.*allowed here: 1, 2;"):
        layout(f"{two} a2a")
    layout(f"{two} a2a+p2p --ulysses-degree-in-cp 2")
    layout(f"{two} all_gather", dropout=0.1)
    with pytest.raises(UsageError, match=r"--attention-dropout 0\.1"):
        layout(f"{two} p2p", dropout=0.1)
