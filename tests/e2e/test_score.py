"""The score command: trainer and engine give the log-probs of transformers; its table; mistakes.

Every family and variant by both backends, each in enough layouts for every pair of choices
(``support.score_cases``); ``python tests/score_table.py`` prints the numbers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.jobs import ROOT, TorchrunJob, free_port
from support.score_cases import VARIANTS, layouts_of
from support.score_runs import LIMIT_S, TOLERANCE, ScoreWorld, transformers_scores

from mindspeed_rl.data.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow("each")]

FAMILIES = ("qwen3_moe", "deepseek_v3")
LENGTHS = (23, 1, 11, 2)  # one token has nothing to score
VOCAB = 307
ENTRY = ["-m", "mindspeed_rl.score"]
BACKENDS: dict[str, tuple[int, list[str]]] = {
    "megatron": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "engine": (1, ["--backend", "engine", "--rollout-kv-cache-gb", "0.1"]),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    for family in FAMILIES:
        write_tiny_model(folder / family, family=family)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    np.savez(folder / "in.npz", tokens=tokens, length=np.array(LENGTHS))
    return folder


def flags(family: str, output: str, more: list[str]) -> list[str]:
    return [
        *("--hf-checkpoint", family, "--platform", "cpu", "--make-vocab-size-divisible-by", "8"),
        *("--tokens", "in.npz", "--output", output, *more),
    ]


@pytest.fixture(scope="module")
def scored(world: Path) -> Callable[[str], dict[str, Path]]:
    """Family -> results of both backends, which run at the same time."""

    @cache
    def run(family: str) -> dict[str, Path]:
        outputs = {backend: world / f"{family}.{backend}.npz" for backend in BACKENDS}
        with ExitStack() as stack:
            jobs = [
                stack.enter_context(
                    TorchrunJob(
                        world,
                        ENTRY,
                        flags(family, outputs[backend].name, more),
                        num_ranks=num_ranks,
                        port=free_port(),
                    )
                )
                for backend, (num_ranks, more) in BACKENDS.items()
            ]
            for job in jobs:
                ended = job.end(LIMIT_S)
                assert ended.returncodes == (0,), ended.output
                assert "4 sequences, 37 tokens: " in ended.output
        return outputs

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(
    family: str, backend: str, world: Path, scored: Callable[[str], dict[str, Path]]
) -> None:
    logp, entropy = transformers_scores(world / family, world / "in.npz")
    found = np.load(scored(family)[backend])
    assert found["length"].tolist() == list(LENGTHS)
    assert found["logp"].dtype == found["entropy"].dtype == np.float32
    assert np.abs(found["logp"] - logp).max() <= TOLERANCE
    assert np.abs(found["entropy"] - entropy).max() <= TOLERANCE
    assert logp.min() < -3, "the comparison is of real numbers"
    unscored = np.arange(max(LENGTHS))[None] >= np.array(LENGTHS)[:, None]
    assert not found["logp"][unscored].any()
    assert not found["logp"][:, 0].any()


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> ScoreWorld:
    return ScoreWorld(tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_scored_as_by_transformers(
    variant: str, backend: str, variants: ScoreWorld
) -> None:
    """Warm ranks, without torchrun's agent."""
    found = {
        layout.name: variants.difference(variant, backend, layout)
        for layout in layouts_of(backend)[variant]
    }
    assert len(found) >= 2
    assert {name: d for name, d in found.items() if not d.largest <= TOLERANCE} == {}
    assert variants.expected(variant)[0].min() < -3, "the comparison is of real numbers"


def score(world: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command as the only rank of a job, without a launcher."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *ENTRY, *argv], cwd=world, env=os.environ | alone | store | path,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_compare_prints_how_two_results_differ(
    world: Path, scored: Callable[[str], dict[str, Path]]
) -> None:
    outputs = scored("qwen3_moe")
    shifted = dict(np.load(outputs["engine"]))
    shifted["logp"] = shifted["logp"].copy()
    shifted["logp"][2, 5] += 0.5
    np.savez(world / "shifted.npz", **shifted)
    done = score(world, "--compare", str(outputs["megatron"]), "shifted.npz")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("33 tokens of 4 sequences\n")
    (line,) = re.findall(r"^logp .*$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"logp +5\.000e-01 .* sequence 2 token 5", line), done.stdout
    assert re.search(r"^probability ratio a/b: 0\.606\d+ to 1\.0000\d+$", done.stdout, re.MULTILINE)


def test_bad_sequences_end_a_job(world: Path) -> None:
    """The other messages about sequences are in tests/unit/test_scores.py."""
    np.savez(world / "bad.npz", tokens=np.full((1, 3), VOCAB), length=np.array([3]))
    done = score(world, *flags("qwen3_moe", "bad.out.npz", ["--tokens", "bad.npz"]))
    assert done.returncode == 2, done.stderr
    assert "--tokens bad.npz: ids from 307 to 307; allowed: 0 to 306" in done.stderr
    assert not (world / "bad.out.npz").exists()
