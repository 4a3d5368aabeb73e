"""The buffer that the dispatch of experts needs, and the tokens that decide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import EngineTuningConfig
from mindspeed_rl.core.installed import engine_machine
from mindspeed_rl.planning.expert_dispatch import (
    ExpertDispatch,
    dispatched_tokens,
    uses_two_levels,
)
from mindspeed_rl.rollout.provider import EngineSizes

MIB = 2**20


def needed_mb(case: ExpertDispatch, machine: str) -> int:
    return -(-case.buffer_bytes(machine) // MIB)


def test_it_is_what_a_device_said_that_it_needs() -> None:
    """An A3 refused 200 MB for Qwen3-Next: 64 tokens, 512 experts on 4 ranks, NEEDED 294 MB.

    The message counted no shared expert, and names the next whole number above its 293 MiB; ours
    counts a shared one, 0.5 MiB, which is the operator's default.
    """
    case = ExpertDispatch(hidden_size=2048, experts=512, top_k=10, ranks=4, tokens=64)
    without = 2 * (64 * 4608 * 4 * 128 + 64 * 4096 * 10)
    assert case.buffer_bytes("a3") == without + 2 * 64 * 4096
    assert without == 293 * MIB and needed_mb(case, "a3") == 294


@pytest.mark.parametrize(
    ("machine", "two_levels", "expected"),
    [
        # tokens of 14336 bytes: 14848 with what follows them, in slots of 512
        ("a3", False, 2 * 32 * (2 * 128 * 14848 + 9 * 14336)),
        ("a2", False, 2 * (32 * 128 * 2 * 14336 + 2 * MIB)),
        # 32 tokens of 14336 + 128 bytes are 904 slots of 512
        ("a2", True, (256 + 32) * 904 * 512 + 8 * MIB),
    ],
)
def test_deepseek_on_128_ranks(machine: str, two_levels: bool, expected: int) -> None:
    case = ExpertDispatch(7168, 256, 8, 128, 32, two_levels)
    assert case.buffer_bytes(machine) == expected


def test_a_rank_with_few_experts_sends_to_those_alone() -> None:
    """On an A2 at most as many as a rank has, or as a token chooses."""
    few = ExpertDispatch(1024, 64, 8, 32, 16)
    many = ExpertDispatch(1024, 512, 8, 32, 16)
    assert few.buffer_bytes("a2") == 2 * (16 * 32 * 2 * 2048 + 2 * MIB)
    assert many.buffer_bytes("a2") == 2 * (16 * 32 * 8 * 2048 + 2 * MIB)


@pytest.mark.parametrize(
    ("ranks", "experts", "needs"),
    [(16, 128, True), (8, 128, False), (16, 384, True), (16, 400, False), (1, 128, False)],
)
def test_an_a2_uses_the_operators_with_many_ranks_and_few_experts(
    ranks: int, experts: int, needs: bool
) -> None:
    case = ExpertDispatch(2048, experts, 8, ranks, 64)
    assert bool(case.buffer_bytes("a2")) == needs
    assert bool(case.buffer_bytes("a3")) == (ranks > 1)


@pytest.mark.parametrize(
    ("tuning", "options", "tp", "expected"),
    [
        ({}, {}, 1, 96),
        ({}, {}, 2, 48),
        ({}, {}, 5, 20),
        ({"rollout_graph_sizes": ("auto",)}, {}, 2, 48),
        ({"rollout_graph_sizes": ("8", "200")}, {}, 4, 50),
        ({"rollout_graph_sizes": ("8", "64")}, {}, 1, 96),
        ({}, {"compilation_config": {"cudagraph_capture_sizes": [4, 120]}}, 2, 60),
        ({}, {"additional_config": {"enable_prefill_mc2": True}}, 4, 256),
        ({}, {"additional_config": {"enable_prefill_mc2": True}}, 1, 512),
        ({"rollout_graph_sizes": ("4096",)}, {}, 2, 512),
    ],
)
def test_tokens_are_those_of_the_largest_decode_step(
    tuning: dict[str, tuple[str, ...]], options: dict[str, object], tp: int, expected: int
) -> None:
    sizes = EngineSizes(batched_tokens=1024, sequences=96, block_tokens=128)
    given = EngineTuningConfig(**tuning)  # type: ignore[arg-type]
    assert dispatched_tokens(given, options, sizes, tp) == expected


def test_two_levels_are_asked_for_by_a_key_or_by_two_variables() -> None:
    both = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}
    key = {"additional_config": {"enable_mc2_hierarchy_comm": True}}
    assert uses_two_levels({}, both) and uses_two_levels(key, {})
    assert not uses_two_levels({}, both | {"HCCL_INTRA_ROCE_ENABLE": "1"})
    assert not uses_two_levels({"additional_config": {}}, {})


def test_the_machine_is_the_one_that_the_package_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_machine() == ""
    (package / "_build_info.py").write_text("# Auto-generated file\n__device_type__ = 'A3'\n")
    assert engine_machine() == "a3"
