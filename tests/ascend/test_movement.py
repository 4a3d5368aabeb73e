"""What moves between emulated NPUs, and between an NPU and its host: weights, samples, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ascend.npu_ranks import WITH_AND_WITHOUT, needs_mindspeed, run_npu_ranks
from support.family_models import FAMILY_CASES, write_family_model
from support.family_reshard import Rollout

pytestmark = pytest.mark.ascend_emul

ROLLOUTS = (
    Rollout(tp=2, whole_experts=True, transposed=True),  # as vLLM-Ascend stores experts
    Rollout(tp=1, transport="p2p"),
)
LAYOUT = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--make-vocab-size-divisible-by", "8"),
    *("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "2"),
)


@pytest.mark.parametrize(
    "flags", [pytest.param((), id="torch_npu"),
              pytest.param(("--moe-grouped-gemm",), id="mindspeed", marks=needs_mindspeed)],
)  # fmt: skip
def test_two_npus_reshard_every_bit_and_exchange_samples(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Three syncs by all-to-all and by single messages; the trainer's weights double in between."""
    from ascend.worlds import movement_world

    layout = (*LAYOUT, *flags)
    names = ("qwen3-moe", "deepseek")
    models = {n: str(write_family_model(FAMILY_CASES[n], tmp_path / n)) for n in names}
    ranks, samples = zip(
        *run_npu_ranks(
            movement_world,
            2,
            work_dir=tmp_path / "ranks",
            args=(models, layout, ROLLOUTS, 7),
            features={"flags": layout} if flags else None,
        ),
        strict=True,
    )
    assert_exchanged(*samples)
    for rank in ranks:
        assert rank.keys() == models.keys()
        for moved in (m for several in rank.values() for m in several):
            assert moved.wrong == [[], [], []] and moved.num_params > 10 and moved.num_rounds > 1


def assert_exchanged(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> None:
    """Rank 0 has the even samples at first, and the odd ones in the end."""
    assert [sample[0] for sample in first] == [1, 3, 5]
    assert [sample[0] for sample in second] == [0, 2, 4, 6]
    for i, prompt, response, logprobs, reward, parts, experts in (*first, *second):
        assert (prompt, len(response), reward, parts) == (7 * i, i, 0.5 * i, (1.0,))
        assert response == list(range(2**30, 2**30 + i))
        assert logprobs == [-0.25 * n for n in range(i)]
        assert experts == bytes(251 - 7 * i - n for n in range(3 * i))


@pytest.mark.parametrize("features", WITH_AND_WITHOUT)
def test_memory_leaves_the_npu_and_comes_back(
    features: Any, tmp_path: Path, tiny_model: Path
) -> None:
    """The driver sees it go; training goes on to the bit."""
    from ascend.worlds import memory_world

    args = (str(tiny_model), 3)
    facts = run_npu_ranks(memory_world, 1, work_dir=tmp_path, args=args, features=features)[0]
    assert facts.owned.keys() == {"parameters", "grad_buffers", "optimizer", "reference"}
    total = sum(facts.owned.values())
    assert total > 4 << 20 and min(facts.owned.values()) > 1 << 18
    # the allocator holds blocks of 2 MiB and more, and gives back whole ones
    assert facts.freed >= 0.8 * total, (facts.freed, facts.owned)
    assert 0 <= facts.back <= 4 << 20
    for mode in ("all", "late"):
        for kept, moved in zip(facts.weights["none"], facts.weights[mode], strict=True):
            assert torch.equal(kept, moved), mode


def test_pinned_memory_is_as_large_as_was_asked_for_and_lives_as_long_as_its_views(
    tmp_path: Path,
) -> None:
    """torch_npu's own would be 64 MiB for 33, and stay in its cache."""
    from ascend.worlds import pinned_world

    facts = run_npu_ranks(pinned_world, 1, work_dir=tmp_path, args=(33 << 20,))[0]
    assert facts.torch_npus >= 64 << 20, "the emulator counts what torch_npu pins"
    assert facts.held == facts.asked == 33 << 20
    assert facts.with_a_view == 33 << 20 and facts.came_back
    assert facts.without_views == 0


def test_blocks_of_no_tensor_are_known(tmp_path: Path) -> None:
    """A tensor's memory is in one of them as soon as it is freed, and not before."""
    from ascend.worlds import blocks_world

    assert run_npu_ranks(blocks_world, 1, work_dir=tmp_path)[0] == [False, True]
