"""Who may speak to the endpoint, where it listens, and what it says to the others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agent_world import agent_run, http
from support.rl_run import TableRun
from support.table_engine import single_rank

from mindspeed_rl.core.agents import AgentConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.endpoint.runner import endpoint_token
from mindspeed_rl.endpoint.workers import agent_environment
from mindspeed_rl.metrics.metric_set import Mean

# The agent leaves its URL and key in a file, and asks once.
LEAVES_ITS_KEY = """
def solve(task):
    with open("__FOLDER__/key", "w") as file:
        json.dump([task.base_url, task.api_key], file)
    ask(task, [user("12")])
    return 1.0
"""
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1"}]}).encode()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TableRun]:
    monkeypatch.setenv("ENDPOINT", "abc")
    body = LEAVES_ITS_KEY.replace("__FOLDER__", str(tmp_path))
    flags = "--rl-endpoint-token-variable ENDPOINT"
    with single_rank(), agent_run(tmp_path, body, flags) as found:
        yield found


def base_url(run: TableRun) -> str:
    environments: Any = run.parts.rollouts.environments
    return str(environments.runner.base_url)


def test_only_those_who_know_the_token_are_answered(run: TableRun) -> None:
    url = base_url(run)
    assert url.startswith("http://127.0.0.1:")
    for key in ("", "ab", "abd", "abcd", "Abc", "ab\xff"):
        for path, body in (("/models", None), ("/chat/completions", BODY)):
            status, answer = http(url, path, key, body)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), key
    status, answer = http(url, "/models", "abc")
    assert status == 200 and [m["id"] for m in answer["data"]] == ["policy"]
    status, answer = http(url, "/chat/completions", "abc.", BODY)
    assert status == 401 and "no conversation" in answer["error"]["message"]
    status, answer = http(url, "/completions", "abc", BODY)
    assert status == 404 and "GET /v1/models" in answer["error"]["message"]
    assert http(url, "/chat/completions", "abc")[0] == 405


def test_the_key_of_a_conversation_ends_with_it(run: TableRun, tmp_path: Path) -> None:
    assert run.generate().metrics["environment/error_rate"] == Mean(0.0, 6.0)
    url, key = json.loads((tmp_path / "key").read_text())
    assert url == base_url(run) and key.startswith("abc.")
    status, answer = http(url, "/chat/completions", key, BODY)
    assert (status, answer["error"]["code"]) == (410, "conversation_over")
    run.generate(2)
    status, answer = http(url, "/chat/completions", key, BODY)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_it_listens_at_one_address_and_no_longer_than_the_run(
    tmp_path: Path, run: TableRun
) -> None:
    port = int(base_url(run).split(":")[2].removesuffix("/v1"))
    (tmp_path / "other").mkdir()
    with (
        pytest.raises(UsageError, match=f"--rl-endpoint-port {port}: cannot be listened on"),
        agent_run(tmp_path / "other", "def solve(task): ...", f"--rl-endpoint-port {port}"),
    ):
        pass
    with socket.socket() as other:  # another address of the node
        assert other.connect_ex(("127.0.0.2", port)) != 0
    run.parts.rollouts.close()
    with socket.socket() as late:
        assert late.connect_ex(("127.0.0.1", port)) != 0


def test_a_token_is_random_or_that_of_the_variable() -> None:
    made = {endpoint_token(AgentConfig(), {}) for _ in range(3)}
    assert len(made) == 3 and min(map(len, made)) >= 32
    named = AgentConfig(rl_endpoint_token_variable="MINE")
    assert endpoint_token(named, {"MINE": " x1 "}) == "x1"
    for environ in ({}, {"MINE": " "}, {"MINE": "a b"}, {"MINE": "ä"}):
        with pytest.raises(UsageError, match="--rl-endpoint-token-variable MINE: "):
            endpoint_token(named, environ)


def test_agents_get_no_secrets_and_no_proxy_to_the_endpoint() -> None:
    environ = {"OPENAI_API_KEY": "s", "MY_TOKEN": "t", "no_proxy": "other", "RANK": "3"}
    flags = AgentConfig(rl_agent_secrets=("MY_TOKEN",))
    found = agent_environment({**environ, "PATH": os.environ["PATH"]}, flags)
    assert "OPENAI_API_KEY" not in found and "RANK" not in found
    assert found["MY_TOKEN"] == "t"
    assert found["no_proxy"] == "other,127.0.0.1" and found["NO_PROXY"] == "127.0.0.1"
