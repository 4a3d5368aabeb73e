"""Streams: events come while the turn is sampled, and what is trained on stays what was sampled.

The engine of these tests goes on only when the client has read what was sampled before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tiny_model import build_tokenizer
from support.agent_answers import answers
from support.agent_world import Sayer, agent_run, heard, said
from support.table_engine import single_rank

from mindspeed_rl.core.agents import AgentConfig
from mindspeed_rl.core.types import Completion, Prompt
from mindspeed_rl.endpoint.conversations import (
    AgentConversations,
    Conversation,
    ConversationRules,
)
from mindspeed_rl.endpoint.live import LiveText
from mindspeed_rl.endpoint.runner import AgentRunner
from mindspeed_rl.endpoint.tools import OPEN, split_calls
from mindspeed_rl.environments import Failed, Observation
from mindspeed_rl.generation.partners import agent_opening
from mindspeed_rl.metrics.metric_set import Mean
from mindspeed_rl.rollout.engine import Arrivals
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens, SamplingSettings

LIMIT_S = 60.0
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HERMES = """\
{%- for t in tools or [] %}{{ '<|user|># ' + (t | tojson) }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>{"name": "' + call.function.name +
 '", "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}
{{- '<|end|>' }}
{%- else %}{{ '<|user|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


# --- what may be shown ---------------------------------------------------------------------------


def from_bytes(some: Sequence[int]) -> str:
    """Tokens are single bytes, so characters are cut in the middle and bytes are no text."""
    return bytes(some).decode("utf-8", "replace")


PARTS = st.sampled_from([OPEN, CALL, "<tool", "<<", "call>", "é", "\U0001f600", "a b", "\n"])


@given(st.lists(PARTS | st.binary(max_size=3), max_size=8), st.booleans(), st.data())
def test_what_is_shown_is_never_taken_back(
    parts: list[str | bytes], calls: bool, data: st.DataObject
) -> None:
    ids = b"".join(p.encode() if isinstance(p, str) else p for p in parts)
    live, shown, read = LiveText(from_bytes, calls=calls), "", 0
    while read < len(ids):
        read += data.draw(st.integers(1, len(ids) - read))
        shown += live.grow(ids[:read])
        assert live.shown == shown
    whole = live.end(ids)
    assert whole == from_bytes(ids) and whole.startswith(shown)
    if calls:
        content, found = split_calls(whole)
        assert content.startswith(shown) and OPEN not in shown
        assert not found or content == whole.partition(OPEN)[0]


@given(st.text(st.characters(max_codepoint=127), max_size=12))
def test_a_character_is_shown_as_soon_as_it_is_there(text: str) -> None:
    live = LiveText(from_bytes, calls=False)
    assert [live.grow(text[: n + 1].encode()) for n in range(len(text))] == list(text)


def test_the_beginning_of_a_call_is_kept_until_it_is_none() -> None:
    live = LiveText(from_bytes, calls=True)
    pieces = [live.grow(text.encode()) for text in ("a <", "a <to", "a <too", "a <toot <")]
    assert pieces == ["a ", "", "", "<toot "]
    assert live.grow(f"a <toot {CALL} x".encode()) == "", "whether it is one is seen at the end"


def test_bytes_of_no_text_are_kept_for_a_while_only() -> None:
    live = LiveText(from_bytes, calls=False)
    shown = [live.grow(b"\xff" * n) for n in range(1, 300)]
    assert "".join(shown).startswith("\ufffd" * 256)
    assert live.end(b"\xff" * 300) == "\ufffd" * 300


def test_a_decoder_that_changes_its_mind_changes_nothing_that_was_shown() -> None:
    """It takes blanks in front of a full stop away."""

    def tidy(some: Sequence[int]) -> str:
        return from_bytes(some).replace(" .", ".")

    live = LiveText(tidy, calls=False)
    assert [live.grow(b"so"), live.grow(b"so ")] == ["so", " "]
    assert live.grow(b"so .") == "."
    assert live.end(b"so . ok") == "so . ok", "the client sends back what it was shown"


# --- the openai client ---------------------------------------------------------------------------

AGENT = """
import json, threading
from openai import APIError, OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

def solve(task):
    client = OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "user", "content": "hi"}]
    tools = {"tools": TOOLS} if task.answer == "tools" else {}
    asked = {"model": "policy", "messages": messages, **tools}

    def note(line):
        with open("__SEEN__" + task.prompt, "a") as file:
            file.write(json.dumps(line) + "\\n")

    def read():
        stream = client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **asked)
        try:
            for chunk in stream:
                if not chunk.choices:
                    note({"said": chunk.usage.completion_tokens})
                    continue
                (choice,) = chunk.choices
                calls = [c.function.model_dump() for c in choice.delta.tool_calls or []]
                note({"id": chunk.id, "text": choice.delta.content, "calls": calls,
                      "reason": choice.finish_reason})
                if task.answer in ("leaves", "returns"):
                    break
        finally:
            if task.answer == "leaves":
                stream.close()
        return stream

    if task.answer == "whole":
        client.chat.completions.create(**asked)
    stream = read()
    if task.answer == "returns":
        def rest():
            try:
                for chunk in stream:
                    pass
            except APIError as error:
                note({"error": error.code, "told": error.message})
        threading.Thread(target=rest, daemon=True).start()
    if task.answer == "leaves":
        note({"again": client.chat.completions.create(**asked).choices[0].message.content})
    return 0.5
"""


class Client:
    """A client with a conversation, as the engine's side and its reader see it.

    Attributes:
        requests: Number of the conversation of every request.
    """

    requests: ClassVar[list[int]] = []

    def __init__(self, runner: AgentRunner, seen: Path, asked: Observation) -> None:
        self._runner, self._seen, self._asked = runner, seen, asked

    def watch(self, first: int, token_ids: tuple[int, ...]) -> None:
        """Sample these tokens of the turn."""
        assert self._asked.watch is not None
        self._asked.watch(first, token_ids)

    def seen(self, enough: Callable[[list[Any]], bool]) -> list[Any]:
        """What it has noted, as soon as that is enough."""
        ends, lines = time.monotonic() + LIMIT_S, []
        while time.monotonic() < ends:
            text = self._seen.read_text() if self._seen.exists() else ""
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
            if enough(lines):
                return lines
            time.sleep(0.01)
        raise AssertionError(f"the client has seen {lines}")

    def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests of the conversation have come to the endpoint."""
        ends = time.monotonic() + LIMIT_S
        while self.requests.count(0) < count:
            assert time.monotonic() < ends
            time.sleep(0.01)

    def wait_for_the_agent(self) -> None:
        """Wait until the function of the agent has returned and the endpoint knows."""
        ends = time.monotonic() + LIMIT_S
        while self._runner._conversations[0].end is None:
            assert time.monotonic() < ends
            time.sleep(0.01)

    def close(self) -> None:
        """Close the endpoint."""
        self._runner.close()

    @property
    def is_closed(self) -> bool:
        """Whether nothing of the endpoint is left."""
        return self._runner._loop.is_closed() and not self._runner._thread.is_alive()

    def says(self, token_ids: Sequence[int]) -> Any:
        """End the turn; the answer of the agent."""
        self._runner.step({0: tuple(token_ids)})
        return answers(self._runner, 1, LIMIT_S)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = build_tokenizer(["calc(1+2)"] * 3, 262)
    found.chat_template = HERMES
    return found


@pytest.fixture
def begin(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Client]]:
    """Begins the conversation of a kind of client."""
    complete = AgentConversations.complete

    def counted(self: AgentConversations, conversation: Conversation, *about: Any) -> Any:
        Client.requests.append(conversation.number)
        return complete(self, conversation, *about)

    Client.requests.clear()
    monkeypatch.setattr(AgentConversations, "complete", counted)
    file = tmp_path / "agent.py"
    file.write_text(AGENT.replace("__SEEN__", f"{tmp_path}/"))
    flags = AgentConfig(rl_agent=f"{file}:solve", rl_agent_workers=1)
    stop = frozenset({int(tokenizer.eos_token_id)})
    runner = AgentRunner(ConversationRules(flags, 900, stop), tokenizer)

    def of(kind: str) -> Client:
        runner.reset({0: Prompt(0, agent_opening(tokenizer), kind, kind)})
        return Client(runner, tmp_path / kind, answers(runner, 1, LIMIT_S)[0])

    yield of
    runner.close()


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(line.get("text") or "" for line in lines)


def test_the_openai_client_reads_each_token_before_the_next_is_sampled(
    begin: Callable[[str], Client], tokenizer: Any
) -> None:
    client = begin("reads")
    said = "it is \U0001f600!"
    ids = ids_of(tokenizer, f"{said}<|end|>")
    shown = ""
    for n in range(1, len(ids)):
        client.watch(n - 1, ids[n - 1 : n])
        whole = tokenizer.decode(list(ids[:n]), skip_special_tokens=True).rstrip("\ufffd")
        lines = client.seen(lambda lines, whole=whole: lines and text_of(lines) == whole)
        assert whole.startswith(shown)
        shown = whole
    assert not any(line["reason"] for line in lines), "the turn is not whole"
    assert client.says(ids) == Observation(done=True, reward=0.5, behind=1)
    lines = client.seen(lambda lines: "said" in lines[-1])
    assert text_of(lines) == said and lines[-2]["reason"] == "stop"
    assert len({line["id"] for line in lines[:-1]}) == 1
    assert lines[-1]["said"] == len(ids)


def test_tokens_behind_a_gap_wait_for_the_end_of_the_turn(
    begin: Callable[[str], Client], tokenizer: Any
) -> None:
    """As when the turn was sampled by another engine meanwhile."""
    client = begin("gap")
    ids = ids_of(tokenizer, "abcdefg<|end|>")
    client.watch(0, ids[:2])
    client.seen(lambda lines: text_of(lines) == "ab")
    client.watch(4, ids[4:5])
    client.watch(1, ids[1:3])  # known ones as well
    lines = client.seen(lambda lines: len(text_of(lines)) > 2)
    assert text_of(lines) == "abc"
    client.says(ids)
    assert text_of(client.seen(lambda lines: "said" in lines[-1])) == "abcdefg"


def test_text_in_front_of_a_call_is_shown_and_the_call_comes_whole(
    begin: Callable[[str], Client], tokenizer: Any
) -> None:
    client = begin("tools")
    ids = ids_of(tokenizer, f"so: {CALL}<|end|>")
    client.watch(0, ids[:-1])
    lines = client.seen(lambda lines: text_of(lines) == "so: ")
    assert not any(line["calls"] for line in lines)
    client.says(ids)
    lines = client.seen(lambda lines: "said" in lines[-1])
    assert text_of(lines) == "so: " and lines[-2]["reason"] == "tool_calls"
    (calls,) = [line["calls"] for line in lines[:-1] if line["calls"]]
    assert calls == [{"name": "add", "arguments": '{"a": 1}'}]


def test_a_client_that_left_a_stream_gets_the_same_turn_again(
    begin: Callable[[str], Client], tokenizer: Any
) -> None:
    """The engine is asked once, and the turn counts as read when it was read whole."""
    client = begin("leaves")
    ids = ids_of(tokenizer, "yes<|end|>")
    client.watch(0, ids[:1])
    client.seen(lambda lines: len(lines) == 1)
    client.wait_for_requests(2)  # the second waits for the first, whose client has gone
    assert client.says(ids) == Observation(done=True, reward=0.5, behind=1)
    assert client.seen(lambda lines: len(lines) == 2)[1] == {"again": "yes"}


def test_a_conversation_that_ends_amid_a_stream_ends_it_with_an_error(
    begin: Callable[[str], Client], tokenizer: Any
) -> None:
    client = begin("returns")
    ids = ids_of(tokenizer, "yes<|end|>")
    client.watch(0, ids[:1])
    client.seen(lambda lines: len(lines) == 1)
    client.wait_for_the_agent()
    ended = client.says(ids)
    assert isinstance(ended, Failed) and "before it had read a turn" in ended.trace
    assert client.seen(lambda lines: len(lines) == 2)[1]["error"] == "conversation_over"


@pytest.mark.parametrize("kind", ["reads", "whole"])
def test_an_endpoint_closes_while_a_turn_is_sampled(
    begin: Callable[[str], Client], tokenizer: Any, kind: str
) -> None:
    """A run that fails amid a step must end with its own error."""
    client = begin(kind)
    if kind == "reads":
        client.watch(0, ids_of(tokenizer, "y"))
        client.seen(lambda lines: len(lines) >= 1)
    client.close()
    assert client.is_closed


# --- a whole step --------------------------------------------------------------------------------

STREAMS = """
def solve(task):
    messages = [user("12")]
    for turn in range(2):
        body = json.dumps({"model": task.model, "messages": messages, "stream": True}).encode()
        headers = {"Authorization": "Bearer " + task.api_key}
        request = urllib.request.Request(task.base_url + "/chat/completions", body, headers)
        text = ""
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    if not text:
                        with open("__SEEN__", "a") as file:
                            file.write("event\\n")
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["delta"].get("content") or "-"
        messages += [{"role": "assistant", "content": text.strip("-")}, user("3")]
    return 1.0
"""


class Held(Sayer):
    """Samples the last tokens of turns only when the clients have their first events.

    Attributes:
        seen: File with a line for each first event.
        early: Whether first events were there before the last tokens, by step.
    """

    seen: Path

    def __init__(self) -> None:
        super().__init__()
        self.early: list[bool] = []

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        version: int,
        on_step: Any = None,
        rebalancer: object | None = None,
        arrivals: Arrivals | None = None,
    ) -> dict[int, Completion]:
        assert arrivals is not None
        show, begun = arrivals.show, 0

        def held(sampled: Mapping[int, NewTokens]) -> None:
            nonlocal begun
            show(sampled)
            begun += sum(new.first == 0 for new in sampled.values())
            if sampled:
                self.early.append(self._wait(begun))

        arrivals.show = held  # type: ignore[method-assign]
        return super().generate(requests, settings, version, on_step, rebalancer, arrivals)

    def _wait(self, count: int) -> bool:
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends:
            if self.seen.exists() and len(self.seen.read_text().splitlines()) >= count:
                return True
            time.sleep(0.01)
        return False


def test_streamed_turns_of_a_step_are_trained_on_as_they_were_sampled(tmp_path: Path) -> None:
    """One of the tokens has the text of another, which a tokenizer would make of it."""
    Held.seen = tmp_path / "seen"
    body = STREAMS.replace("__SEEN__", str(Held.seen))
    with single_rank(), agent_run(tmp_path, body, engine=Held) as run:
        rollouts = run.generate()
        assert rollouts.metrics["environment/turns"] == Mean(12.0, 6.0)
        assert rollouts.metrics["environment/branches"] == Mean(0.0, 6.0)
        for i, response in enumerate(run.said(rollouts.samples)):
            tokens = tuple(response["token_ids"].tolist())
            assert tokens == (*heard('"12#'), *said(i), *heard('"3#'), *said(i))
        assert isinstance(run.engine, Held)
        assert len(run.engine.early) >= 4 and all(run.engine.early)
