"""A run of one rank whose responses are conversations with agents, on an engine without a model."""

from __future__ import annotations

import json
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from support.rl_run import PROMPTS, Prompts, TableRun, make_run
from support.table_engine import STOP, TableEngine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.endpoint.conversations import ConversationRules
from mindspeed_rl.endpoint.runner import AgentRunner
from mindspeed_rl.generation.multi_turn import Environments
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings

FIRST = 2  # the token that every conversation begins with
TWIN = 20  # a token with the text of another, which a tokenizer never makes of it
MARKS = {"system": "!", "user": '"', "assistant": "#", "tool": "%"}

CLIENT = '''
import json, os, socket, sys, threading, time, urllib.error, urllib.request

def ask(task, messages, **more):
    """The answer to messages, which it is appended to."""
    body = json.dumps({"model": task.model, "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + task.api_key}
    request = urllib.request.Request(task.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        choice = json.load(answer)["choices"][0]
    messages.append(choice["message"])
    return choice

def user(text):
    return {"role": "user", "content": text}

def number(task):
    return int(task.prompt.split()[1])
'''


class AgentTokenizer:
    """Token ``i`` is the character ``i``, but for :data:`TWIN`; a template with one mark a role."""

    eos_token, eos_token_id = chr(STOP), STOP
    chat_template = name_or_path = "marks"

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        ends = {"assistant": self.eos_token}
        said = (MARKS[m["role"]] + m["content"] + ends.get(m["role"], "") for m in messages)
        return chr(FIRST) + "".join(said) + MARKS["assistant"]

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        said = (i for i in ids if i != STOP or not skip_special_tokens)
        return "".join("7" if i == TWIN else chr(i) for i in said)


class Sayer(TableEngine):
    """Every turn is the sample's token, :data:`TWIN` and the stop token, as far as it may be.

    Attributes:
        pause_s: seconds that each completion takes to begin.
    """

    pause_s = 0.0

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        time.sleep(self.pause_s)
        ids = (4 + request.sample_id, TWIN, STOP)[: request.max_tokens]
        reason = "stop" if ids[-1] == STOP else "length"
        return Completion(ids, tuple(self.weights[list(ids)].tolist()), reason, version)


def write_agent(folder: Path, body: str) -> Path:
    """A file with a function ``solve(task)`` and helpers for requests."""
    path = folder / "agent.py"
    path.write_text(CLIENT + textwrap.dedent(body))
    return path


@contextmanager
def agent_run(
    folder: Path, body: str, flags: str = "", limit: int = 50, engine: type = Sayer
) -> Iterator[TableRun]:
    """A run of 2 prompts x 3 samples whose agents are ``solve`` of a body of Python."""
    path = write_agent(folder, body)
    run = make_run(
        folder,
        f"--rl-agent {path}:solve --rl-agent-workers 1 --rollout-max-response-length {limit} "
        f"{flags} --reward-function format environment",
        rewards={i: float(i % 3) for i in range(6)},
    )
    prompts = cast(Any, Prompts(replace(p, token_ids=(FIRST,)) for p in PROMPTS))
    run.parts = replace(
        run.parts,
        data=replace(run.parts.data, train=prompts),
        samples=replace(run.parts.samples, prompt_tokens=prompts.token_ids),
    )
    run.set_engine(engine())
    runner = open_runner(run)
    config = run.config
    run.set_rollouts(
        environments=Environments(
            runner, config.partner, config.max_turns, config.rewards.reward_max_error_rate
        )
    )
    try:
        yield run
    finally:
        runner.close()


def open_runner(run: TableRun) -> AgentRunner:
    """The agents of a run, and their endpoint."""
    limit = run.config.rollout.rollout_max_response_length
    rules = ConversationRules(run.config.agent, limit, frozenset({STOP}))
    return AgentRunner(rules, cast(Any, AgentTokenizer()))


def heard(text: str) -> tuple[int, ...]:
    """Tokens of a text that somebody else than the model wrote."""
    return tuple(map(ord, text))


def said(sample: int) -> tuple[int, ...]:
    """Tokens of a whole turn of :class:`Sayer`."""
    return (4 + sample, TWIN, STOP)


def http(
    base_url: str, path: str, key: str = "", body: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request to an endpoint."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(base_url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20.0) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
