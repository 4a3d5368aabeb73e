"""Pretraining on Megatron's indexed datasets: rows, losses by layout, resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.indexed_corpus import (
    PretrainResult,
    pretrain_world,
    write_corpus,
)
from support.spawn import RankError, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SEQ_LENGTH = 30  # no multiple of the chunks of two context-parallel ranks
FLAGS = (
    *("--seq-length", str(SEQ_LENGTH), "--global-batch-size", "4", "--micro-batch-size", "2"),
    *("--train-iters", "4", "--lr", "1e-2", "--split", "90,10,0", "--seed", "7"),
    *("--make-vocab-size-divisible-by", "8"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrain")
    write_family_model(FAMILY_CASES["qwen2-tied"], folder / "model")
    write_corpus(folder / "a", VOCAB, 12, seed=0)
    write_corpus(folder / "b", VOCAB, 30, seed=1)
    return folder


def start(root: Path, name: str, num_ranks: int, *flags: str) -> PretrainResult:
    """Two epochs and more of the smaller dataset are read."""
    data = ["--data-path", "0.7", str(root / "a"), "0.3", str(root / "b")]
    argv = ["--hf-checkpoint", str(root / "model"), *data, *FLAGS, *flags]
    results: list[PretrainResult] = run_ranks(
        pretrain_world, num_ranks, work_dir=root, args=(argv, str(root / name))
    )
    assert all(r.rows == results[0].rows for r in results)
    return results[0]


@pytest.fixture(scope="module")
def runs(root: Path) -> Callable[[str], PretrainResult]:
    layouts = {
        "one": (1, "--save", str(root / "saved"), "--save-interval", "2"),
        "dp2": (2,),
        "cp2": (2, "--context-parallel-size", "2"),
    }

    @cache
    def run(name: str) -> PretrainResult:
        num_ranks, *flags = layouts[name]
        return start(root, name, int(num_ranks), *map(str, flags))

    return run


def test_every_token_of_a_row_is_learned(root: Path, runs: Callable[[str], PretrainResult]) -> None:
    """The first loss is transformers' mean over all tokens behind the first of each row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    rows = torch.tensor(runs("one").rows)
    assert rows.shape == (4, SEQ_LENGTH + 1)
    with torch.no_grad():
        logprobs = model(rows[:, :-1]).logits.log_softmax(-1)
    expected = -logprobs.gather(-1, rows[:, 1:, None]).mean()
    assert runs("one").losses[1] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "cp2"])
def test_losses_do_not_depend_on_the_layout(
    layout: str, runs: Callable[[str], PretrainResult]
) -> None:
    """Steps 2 to 4 also see the updates of the steps before them."""
    found, expected = runs(layout), runs("one")
    assert found.rows == expected.rows
    assert found.losses.keys() == {1, 2, 3, 4}
    assert found.losses[1] == pytest.approx(expected.losses[1], rel=1e-6)
    for step in (2, 3, 4):
        assert found.losses[step] == pytest.approx(expected.losses[step], rel=1e-5)


def resume_from_step_2(root: Path, name: str) -> str:
    shutil.copytree(root / "saved", root / name)
    shutil.rmtree(root / name / "iter_0000004")
    return str(root / name)


def test_resuming_gives_the_same_numbers(root: Path, runs: Callable[[str], PretrainResult]) -> None:
    whole = runs("one")
    saved = resume_from_step_2(root, "saved-2")
    resumed = start(root, "resumed", 1, "--load", saved)
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}


def test_another_order_of_data_is_refused(
    root: Path, runs: Callable[[str], PretrainResult]
) -> None:
    runs("one")
    saved = resume_from_step_2(root, "saved-other")
    with pytest.raises(RankError, match="--seed"):
        start(root, "other", 1, "--load", saved, "--split", "50,50,0")


def test_a_logger_that_fails_to_import_is_told_before_a_model_is_built(root: Path) -> None:
    (root / "broken_logger.py").write_text(
        "from megatron.core.parallel_state import model_parallel_is_initialized as ready\n"
        "def init(): ...\n"
        "raise RuntimeError(f'parallel groups: {ready()}')\n"
    )
    with pytest.raises(RankError, match=r"--tracker .*broken_logger\.py.* groups: False"):
        start(root, "untold", 1, "--tracker", str(root / "broken_logger.py"))
