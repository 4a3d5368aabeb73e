"""Training with its memory taken away between the steps equals training that keeps it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.family_models import FAMILY_CASES, write_family_model
from support.offload_world import MODES, OffloadFacts, offload_world
from support.spawn import run_ranks
from support.tiers import slow_but

pytestmark = pytest.mark.distributed

SHARDED = "--use-distributed-optimizer"
WORLDS = {
    "dense-tp2-pp2": (
        "qwen3",
        4,
        f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {SHARDED}",
    ),
    "dense-dp4-bf16": ("qwen3", 4, f"--bf16 {SHARDED}"),
    "dense-dp2-bf16-unsharded": ("qwen3", 2, "--bf16"),
    "moe-ep2-bf16": ("qwen3-moe", 2, f"--bf16 --expert-model-parallel-size 2 {SHARDED}"),
}
COMMON = "--micro-batch-size 4 --make-vocab-size-divisible-by 8 --lr 1e-2"
ALL = {"parameters", "grad_buffers", "optimizer", "reference"}
LEAVE = {"none": set[str](), "optimizer": {"grad_buffers", "optimizer"}, "all": ALL}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[OffloadFacts]]:
    @cache
    def run(name: str) -> list[OffloadFacts]:
        family, num_ranks, flags = WORLDS[name]
        folder = tmp_path_factory.mktemp(name)
        model = write_family_model(FAMILY_CASES[family], folder / "model")
        args = (str(model), [*flags.split(), *COMMON.split()])
        return run_ranks(offload_world, num_ranks, work_dir=folder, args=args)

    return run


@pytest.mark.parametrize("name", slow_but(WORLDS, ["dense-tp2-pp2"]))
def test_ten_steps_are_bit_equal_in_every_mode(
    name: str, worlds: Callable[[str], list[OffloadFacts]]
) -> None:
    for facts in worlds(name):
        for mode in MODES:
            for kept, found in (
                (facts.weights["none"], facts.weights[mode.value]),
                (facts.reference["none"], facts.reference[mode.value]),
            ):
                assert len(kept) == len(found)
                assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True)), mode
        assert any(bool(w.abs().sum() > 0) for w in facts.weights["none"])


@pytest.mark.parametrize("name", slow_but(WORLDS, ["dense-tp2-pp2"]))
def test_what_leaves_is_what_the_mode_says_and_nothing_stays_behind(
    name: str, worlds: Callable[[str], list[OffloadFacts]]
) -> None:
    """Counted over every tensor of the process, by an oracle that knows no owners."""
    for facts in worlds(name):
        assert all(facts.owned[owner] > 0 for owner in ALL)
        for mode, leave in LEAVE.items():
            caches = facts.caches if leave else 0  # dropped with the gradients
            assert facts.freed[mode] == sum(facts.owned[o] for o in leave) + caches, mode
        assert (facts.caches > 0) == ("moe" in name)
        assert "gradients are accumulated and not yet used" in facts.open_gradients
        assert set(facts.left.values()) == {0}, "the last mode is all"
