"""The agent of docs/agents.md with the openai client; the model's words are given by the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import build_tokenizer
from support.agent_answers import answers
from support.pages import python_files

from mindspeed_rl.core.agents import AgentConfig
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.endpoint.conversations import ConversationRules
from mindspeed_rl.endpoint.runner import AgentRunner
from mindspeed_rl.environments import Failed, Observation
from mindspeed_rl.generation.partners import agent_opening

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["calc(1+2)"] * 3, 262)


@pytest.fixture
def runner(tmp_path: Path, tokenizer: Any) -> Iterator[AgentRunner]:
    file = tmp_path / "agent.py"
    file.write_text(python_files("agents.md")["my/agent.py"])
    flags = AgentConfig(rl_agent=f"{file}:solve", rl_agent_workers=1)
    stop = frozenset({int(tokenizer.eos_token_id)})
    found = AgentRunner(ConversationRules(flags, 80, stop), tokenizer)
    yield found
    found.close()


def test_the_agent_calculates_and_is_rewarded(runner: AgentRunner, tokenizer: Any) -> None:
    """Of three samples one is right, one wrong, and one breaks off."""
    first = agent_opening(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    runner.reset({i: Prompt(i, first, f"{i}+8", str(i + 8)) for i in range(3)})
    for i, asked in answers(runner, 3, LIMIT_S).items():
        assert first + asked.token_ids == ids(f"<|user|>{i}+8<|assistant|>")
        assert asked.behind == 0
    runner.step({i: ids(f"calc({i}+8)<|end|>") for i in range(3)})
    for i, asked in answers(runner, 3, LIMIT_S).items():
        assert asked == Observation(ids(f"<|user|>{i + 8}<|assistant|>"), behind=1)
    runner.step({0: ids("8<|end|>"), 1: ids("It is 8<|end|>"), 2: ids("10")})
    ended = answers(runner, 3, LIMIT_S)
    assert not any(isinstance(end, Failed) for end in ended.values()), ended
    assert ended == {i: Observation(done=True, reward=float(i == 0), behind=2) for i in range(3)}


def test_a_conversation_begins_with_the_token_that_all_begin_with(tokenizer: Any) -> None:
    assert tokenizer.decode(list(agent_opening(tokenizer))) == "<|user|>"
