"""tools/bench/rebalance.py: lengths that a run has recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.rebalance import recorded_lengths


def write(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(step: int, prompt: str, num_tokens: int) -> dict[str, object]:
    return {"step": step, "prompt": prompt, "response_ids": list(range(num_tokens))}


def test_siblings_are_those_of_a_prompt_in_a_step(tmp_path: Path) -> None:
    """They may be written in any order; every other one is the earlier epoch."""
    rows = [row(1, "a", 5), row(1, "b", 2), row(1, "a", 0), row(1, "b", 7)]
    found = recorded_lengths(write(tmp_path / "rollouts.jsonl", rows))
    assert found == ([[5], [2]], [[0], [7]])


def test_a_prompt_without_siblings_is_left_out(tmp_path: Path) -> None:
    """The same prompt in another step is another group; of three, two are of the earlier epoch."""
    rows = [row(1, "a", 5), row(2, "a", 1), row(2, "a", 2), row(2, "a", 3)]
    assert recorded_lengths(write(tmp_path / "rollouts.jsonl", rows)) == ([[1, 3]], [[2]])


def test_rollouts_without_tokens_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rollouts.jsonl", [{"step": 1, "prompt": "a", "response": "x"}])
    with pytest.raises(ValueError, match="write it with --log-rollout-tokens"):
        recorded_lengths(file)
