"""A resumed run with drafts gives the numbers of one that was not stopped, whatever its history."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.whole_runs import comparable_rows, warm_run, write_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FLAGS = [
    "--reward-function", "reward.py:digits", "--max-prompt-length", "24",
    "--rollout-max-response-length", "24", "--train-iters", "4", "--save-interval", "2",
    "--grpo-prompts-per-step", "4", "--grpo-group-size", "4", "--micro-batch-size", "4",
    "--lr", "1e-3", "--rollout-tp", "2", "--log-rollouts", "2", "--rollout-drafts", "history",
]  # fmt: skip
# Fewer steps of the engine and other places in its cache are what drafts are for.
OF_STEPS = ("rollout/steps", "rollout/steps_max", "rollout/kv_cache_use_max")


def resumed(folder: Path, name: str) -> str:
    """What a run said that goes on after step 2 of ``whole``, of which ``name`` is a copy."""
    save = f"{name}/save"
    return warm_run(folder, [*FLAGS, "--save", save, "--load", save], output=name)


def assert_equal_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """To the bit, but for the engine's log-probs: seconds decide how many rows a step has."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        rounded = {name for name in mine if name.startswith("mismatch/")}
        assert {n: mine[n] for n in mine.keys() - rounded} == {
            n: other[n] for n in other.keys() - rounded
        }
        for name in rounded:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


def test_a_resumed_run_drafts_and_samples_the_same(tmp_path: Path) -> None:
    """Two epochs; then the second again with the history, and with one that is dropped.

    The other reasons to drop one are in tests/unit/rl/test_saved_drafts.py.
    """
    write_inputs(tmp_path, 8)
    warm_run(tmp_path, [*FLAGS, "--save", "whole/save"], output="whole")
    expected = comparable_rows(tmp_path / "whole", OF_STEPS)
    rollouts = (tmp_path / "whole" / "rollouts.jsonl").read_text()
    assert len(expected) == 4 and len(rollouts.splitlines()) == 8
    for name in ("kept", "cut"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        shutil.rmtree(tmp_path / name / "save" / "iter_0000004")
        file = tmp_path / name / "save" / "drafts.bin"
        content = file.read_bytes()
        assert len(content) > 4000
        if name == "cut":
            file.write_bytes(content[:-1])
        said = resumed(tmp_path, name)
        assert "resuming after step 2" in said
        assert (f"{name}/save/drafts.bin is dropped" in said) is (name != "kept")
        assert ("corrupt" in said) is (name == "cut")
        assert_equal_rows(comparable_rows(tmp_path / name, OF_STEPS), expected)
        assert (tmp_path / name / "rollouts.jsonl").read_text() == rollouts
