"""The agent of docs/agents.md, with the openai client, against the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.pages import python_files
from support.warm_calculator import write_prompts, write_warm_model
from support.whole_runs import train_rl

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OPENING = 4  # tokens of a prompt and its template behind the first: the agent's own message
ASKS = "        reply = client.chat.completions.create(model=task.model, messages=messages)\n"
STREAMS = """\
        from openai.types.chat import ChatCompletion
        chunks = list(client.chat.completions.create(
            model=task.model, messages=messages, stream=True))
        assert all(c.id == chunks[0].id for c in chunks)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        choice = {"index": 0, "finish_reason": chunks[-1].choices[0].finish_reason,
                  "message": {"role": "assistant", "content": text}}
        head = {"id": chunks[0].id, "created": 0, "model": "policy", "object": "chat.completion"}
        reply = ChatCompletion.model_validate({**head, "choices": [choice]})
"""


def test_an_agent_has_the_turns_of_the_environment_that_does_the_same(tmp_path: Path) -> None:
    """Two engines; the model's tokens are those of the calculator, one by one, streamed or not.

    Trainer and engine agree on every token, so the context of later turns holds what was sampled.
    """
    found = {}
    for name, partner, limit in (
        ("agent", "my/agent.py:solve", 36 + OPENING),
        ("streams", "my/agent.py:solve", 36 + OPENING),
        ("environment", "calculator", 36),
    ):
        folder = tmp_path / name
        (folder / "my").mkdir(parents=True)
        agent = python_files("agents.md")["my/agent.py"]
        assert ASKS in agent
        (folder / "my/agent.py").write_text(
            agent.replace(ASKS, STREAMS) if name == "streams" else agent
        )
        write_warm_model(folder / "model", 48)
        write_prompts(folder / "train.jsonl")
        flags = [
            "--rl-environment" if name == "environment" else "--rl-agent", partner,
            "--reward-function", "environment",
            "--tensor-model-parallel-size", "2", "--max-prompt-length", "8",
            "--rollout-max-response-length", str(limit), "--vllm-max-num-seqs", "128",
            "--train-iters", "2", "--grpo-prompts-per-step", "8", "--grpo-group-size", "4",
            "--micro-batch-size", "32", "--lr", "3e-4", "--log-rollouts", "32",
            "--log-rollout-tokens",
        ]  # fmt: skip
        steps = train_rl(folder, flags)
        assert max(step["mismatch/max_abs_logprob"] for step in steps) <= 1e-4
        assert all(step["environment/error_rate"] == 0.0 for step in steps)
        rows = [
            json.loads(line) for line in (folder / "out/rollouts.jsonl").read_text().splitlines()
        ]
        found[name] = [row for row in rows if row["step"] == rows[0]["step"]]
    assert len(found["agent"]) == len(found["environment"]) == 32
    assert list(map(whole, found["streams"])) == list(map(whole, found["agent"]))
    turns = 0
    for ours, theirs in zip(found["agent"], found["environment"], strict=True):
        assert whole(ours) == whole(theirs)
        assert (ours["reward"], ours["finish_reason"]) == (
            theirs["reward"],
            theirs["finish_reason"],
        )
        turns += len(ours["turns"])
    assert any(row["reward"] for row in found["agent"]) and turns > 32


def whole(row: dict[str, Any]) -> list[int]:
    """All tokens of a sample."""
    return [*row["prompt_ids"], *row["response_ids"]]
