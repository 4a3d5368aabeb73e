"""The score command: trainer and engine give the log-probs of transformers; its table; mistakes.

Every family and variant by both backends, in layouts that ``support.score_runs`` chooses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.family_models import VOCAB, write_family_model
from support.jobs import ROOT, free_port
from support.score_runs import (
    BACKENDS,
    ENTRY,
    LENGTHS,
    LIMIT_S,
    ONE_ENGINE,
    TOLERANCE,
    TRAINER_TP2,
    VARIANTS,
    ScoreWorld,
    layouts_of,
    torchrun,
    transformers_scores,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VARIANT = "qwen3-moe"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ScoreWorld:
    return ScoreWorld(tmp_path_factory.mktemp("score"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_scored_as_by_transformers(
    variant: str, backend: str, world: ScoreWorld
) -> None:
    """Warm ranks, without torchrun's agent."""
    layouts = layouts_of(backend, variant)
    found = {layout.name: world.difference(variant, backend, layout) for layout in layouts}
    assert {name: d for name, d in found.items() if not d.largest <= TOLERANCE} == {}
    assert world.expected(variant)[0].min() < -3, "the comparison is of real numbers"


def test_logits_are_divided_by_the_temperature(world: ScoreWorld) -> None:
    cold = replace(TRAINER_TP2, name="cold", flags=(*TRAINER_TP2.flags, "--temperature", "0.5"))
    assert world.difference(VARIANT, "megatron", cold).largest > 0.1, "from temperature 1"
    found = np.load(world.folder / world.output(VARIANT, "megatron", cold))
    expected = transformers_scores(world.folder / VARIANT, world.folder / "in.npz", 0.5)
    for name, wanted in zip(("logp", "entropy"), expected, strict=True):
        assert np.abs(found[name] - wanted).max() <= TOLERANCE, name


def test_an_engine_without_entropy_gives_the_same_log_probs(world: ScoreWorld) -> None:
    layout = replace(ONE_ENGINE, name="no-entropy", flags=("--no-entropy",))
    found = world.difference(VARIANT, "engine", layout)
    assert found.logp <= TOLERANCE
    assert found.entropy == np.abs(world.expected(VARIANT)[1]).max(), "all of it is 0"


def score(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command as the only rank of a job, without a launcher."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", ENTRY, *argv], cwd=folder, env=os.environ | alone | store | path,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_results_are_compared(tmp_path: Path) -> None:
    """The trainer's is made as a user makes it, by torchrun."""
    world = ScoreWorld(tmp_path, torchrun)
    assert world.difference(VARIANT, "megatron", TRAINER_TP2).largest <= TOLERANCE
    trainer = world.output(VARIANT, "megatron", TRAINER_TP2)
    done = score(tmp_path, "--compare", trainer, trainer)  # the table: tests/unit/score
    assert done.returncode == 0, done.stderr
    tokens = sum(LENGTHS) - len(LENGTHS)
    assert done.stdout.startswith(f"{tokens} tokens of {len(LENGTHS)} sequences\n")


def test_bad_sequences_end_a_job(tmp_path: Path) -> None:
    """The other messages about sequences are in tests/unit/data/test_scores.py."""
    write_family_model(VARIANTS[VARIANT], tmp_path / "model")
    np.savez(tmp_path / "bad.npz", tokens=np.full((1, 3), VOCAB), length=np.array([3]))
    argv = ["--hf-checkpoint", "model", "--platform", "cpu", "--make-vocab-size-divisible-by", "8"]
    done = score(tmp_path, *argv, "--tokens", "bad.npz", "--output", "bad.out.npz")
    assert done.returncode == 2, done.stderr
    assert "--tokens bad.npz: ids from 67 to 67; allowed: 0 to 66" in done.stderr
    assert not (tmp_path / "bad.out.npz").exists()


def test_the_cache_of_a_short_text_needs_no_flag(tmp_path: Path) -> None:
    """It holds whole blocks of the engine, of which a text of eleven tokens fills no part."""
    write_family_model(VARIANTS["qwen2-even-vocab"], tmp_path / "model")
    np.savez(tmp_path / "in.npz", tokens=np.arange(11)[None] % VOCAB, length=np.array([11]))
    argv = ["--hf-checkpoint", "model", "--platform", "cpu", "--backend", "engine"]
    done = score(tmp_path, *argv, "--tokens", "in.npz", "--output", "out.npz")
    assert done.returncode == 0, done.stderr
    wanted = transformers_scores(tmp_path / "model", tmp_path / "in.npz")[0]
    assert np.abs(np.load(tmp_path / "out.npz")["logp"] - wanted).max() <= TOLERANCE


def test_sequences_beyond_the_engines_positions_end_a_job(tmp_path: Path) -> None:
    """vLLM's table of YaRN's angles ends with the stretched context, silently."""
    case = VARIANTS["llama-yarn"]
    rope = case.changes["rope_parameters"] | {"factor": 4.0, "original_max_position_embeddings": 16}
    changes = {**case.changes, "rope_parameters": rope}
    write_family_model(replace(case, changes=changes), tmp_path / "model")
    np.savez(tmp_path / "long.npz", tokens=np.zeros((1, 64), np.int64), length=np.array([64]))
    argv = ["--hf-checkpoint", "model", "--platform", "cpu", "--backend", "engine"]
    done = score(tmp_path, *argv, "--tokens", "long.npz", "--output", "long.out.npz")
    assert done.returncode == 2, done.stderr
    assert "lengths from 64 to 64; allowed: 1 to 63 " in done.stderr
