"""Calls of tools: what the `openai` client gets, on the tokens that were sampled.

The model's words are given by the test, as tokens; the tokenizer is a byte-level one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_tiny_model import CHAT_TEMPLATE, build_tokenizer
from support.agent_answers import answers

from mindspeed_rl.core.agents import AgentConfig
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.endpoint.conversations import AgentConversations, ConversationRules
from mindspeed_rl.endpoint.requests import ApiError, parse_request
from mindspeed_rl.endpoint.runner import AgentRunner
from mindspeed_rl.endpoint.tools import ToolCall, split_calls, why_no_tools
from mindspeed_rl.environments import Observation
from mindspeed_rl.generation.partners import agent_opening

LIMIT_S = 60.0
HERMES = """\
{%- if tools %}{{ '<|user|># Tools' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name +
 '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|end|>' }}
{%- else %}{{ '<|user|>' + m.role + ':' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
XML = HERMES.replace("""'\\n<tool_call>\\n{"name": "'""", """'\\n<tool_call>\\n<function="'""")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


def with_template(template: str) -> Any:
    found = build_tokenizer(["calc(1+2)"] * 3, 262)
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return with_template(HERMES)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", ()),
        (f"so: {CALL}", "so: ", (("add", {"a": 1, "b": 2}),)),
        (f"{CALL}\n{CALL}\n", "", (("add", {"a": 1, "b": 2}),) * 2),
        ('<tool_call>{"name": "x", "arguments": {}}</tool_call>', "", (("x", {}),)),
        (f"{CALL} and", None, ()),
        (f"{CALL} and {CALL}", None, ()),
        (CALL.removesuffix("</tool_call>"), None, ()),
        ("<tool_call>{}</tool_call>", None, ()),
        ('<tool_call>{"name": "x", "arguments": "{}"}</tool_call>', None, ()),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, ()),
        ('<tool_call>{"name": "x", "arguments": {}, "id": 1}</tool_call>', None, ()),
        ("<tool_call><function=x></function></tool_call>", None, ()),
        ("[TOOL_CALLS] [{}]", None, ()),
    ],
)
def test_calls_are_read_in_one_format_and_no_text_is_lost(
    text: str, content: str | None, calls: tuple[tuple[str, Any], ...]
) -> None:
    found = split_calls(text)
    assert found == (text if content is None else content, tuple(ToolCall(*c) for c in calls))


def test_a_template_serves_tools_if_it_shows_them_and_writes_calls_that_are_read(
    tokenizer: Any,
) -> None:
    assert why_no_tools(tokenizer) == ""
    assert "another format" in why_no_tools(with_template(XML))
    assert "does not show" in why_no_tools(with_template(CHAT_TEMPLATE))
    blind = HERMES.replace("{{ t | tojson }}", "")
    assert "does not show" in why_no_tools(with_template(blind))
    refusing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}x"
    assert "no tools" in why_no_tools(with_template(refusing))


AGENT = """
import json
from openai import BadRequestError, OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

def streamed(client, **asked):
    content, calls, reason, usage = [], {}, None, None
    for chunk in client.chat.completions.create(
        model="policy", stream=True, stream_options={"include_usage": True}, **asked
    ):
        if not chunk.choices:
            usage = chunk.usage
            continue
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        content += [choice.delta.content] if choice.delta.content else []
        for part in choice.delta.tool_calls or []:
            calls[part.index] = part
    return content, calls, reason, usage

def solve(task):
    client = OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages = [{"role": "user", "content": task.prompt}]
    asked = {"messages": messages, "tools": TOOLS}
    if task.answer == "stream":
        content, calls, reason, usage = streamed(client, **asked)
        assert "".join(content) == "so: " and sorted(calls) == [0, 1], content
        assert reason == "tool_calls"
        assert usage.completion_tokens > 10
        calls = [calls[i] for i in range(2)]
        said = {"role": "assistant", "content": "".join(content), "tool_calls": [
            {"id": c.id, "type": "function", "function": c.function.model_dump()} for c in calls]}
    else:
        choice = client.chat.completions.create(model="policy", **asked).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "so: "
        said, calls = choice.message, choice.message.tool_calls
    assert len({c.id for c in calls}) == 2
    numbers = [json.loads(c.function.arguments) for c in calls]
    assert [c.function.name for c in calls] == ["add", "add"]
    messages.append(said)
    messages += [{"role": "tool", "tool_call_id": c.id, "content": str(n["a"] + n["b"])}
                 for c, n in zip(calls, numbers)]
    content, calls, reason, usage = streamed(client, messages=messages, tools=TOOLS)
    assert not calls and reason == "stop", content
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return float("".join(content) == "it is 3 \\U0001f600!")
"""


@pytest.fixture
def runner(tmp_path: Path, tokenizer: Any) -> Iterator[AgentRunner]:
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    flags = AgentConfig(rl_agent=f"{file}:solve", rl_agent_workers=1)
    stop = frozenset({int(tokenizer.eos_token_id)})
    found = AgentRunner(ConversationRules(flags, 900, stop), tokenizer)
    yield found
    found.close()


def test_the_openai_client_streams_and_calls_tools_on_the_sampled_tokens(
    runner: AgentRunner, tokenizer: Any
) -> None:
    first = agent_opening(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    kinds = ("stream", "whole")
    runner.reset({i: Prompt(i, first, f"{i}", kind) for i, kind in enumerate(kinds)})
    for i, asked in answers(runner, 2, LIMIT_S).items():
        shown = f"<|user|># Tools{json.dumps(ADD)}<|user|>user:{i}<|assistant|>"
        assert first + asked.token_ids == ids(shown) and asked.behind == 0
    # Other blanks and order than a template would write, so that rendering it would be noticed.
    runner.step(dict.fromkeys(range(2), ids(f"so: {CALL}{CALL}<|end|>")))
    for asked in answers(runner, 2, LIMIT_S).values():
        between = "<|user|>tool:3<|user|>tool:3<|assistant|>"
        assert asked == Observation(ids(between), behind=1)
    runner.step(dict.fromkeys(range(2), ids("it is 3 \U0001f600!<|end|>")))
    ended = answers(runner, 2, LIMIT_S)
    assert ended == dict.fromkeys(range(2), Observation(done=True, reward=1.0, behind=2)), ended


MESSAGES = [{"role": "user", "content": "hi"}]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": MESSAGES, **fields}).encode()


class Engine:
    """Answers every turn with the same tokens, and counts them."""

    def __init__(self, tokenizer: Any, said: str) -> None:
        stop = frozenset({int(tokenizer.eos_token_id)})
        rules = ConversationRules(AgentConfig(rl_agent="a.py:f"), 900, stop)
        self.asked: list[Observation] = []
        self.requests: list[Any] = []
        self._said = tuple(tokenizer(said, add_special_tokens=False)["input_ids"])
        self.conversations = AgentConversations(rules, tokenizer, self._answer)
        self.conversations.begin({0: Prompt(0, agent_opening(tokenizer), "", "")})

    def _answer(self, number: int, answer: Any) -> None:
        self.asked.append(answer)
        loop = asyncio.get_running_loop()
        loop.call_soon(self.conversations.take_turn, number, self._said)

    async def ask(self, **fields: Any) -> Any:
        asked = parse_request(body(**fields))
        self.requests.append(asked)
        return await self.conversations.complete(self.conversations[0], asked, lambda: True)


def test_a_turn_that_broke_off_while_it_was_read_is_given_again(tokenizer: Any) -> None:
    engine = Engine(tokenizer, "yes<|end|>")
    conversations, conversation = engine.conversations, engine.conversations[0]

    async def talk() -> None:
        first = await engine.ask(stream=True)
        conversations.take_back(conversation, first, engine.requests[0])
        assert conversation.read == 0
        again = await engine.ask()
        assert again is first and conversation.read == 1 and len(engine.asked) == 1
        conversations.take_back(conversation, first, engine.requests[0])
        assert conversation.read == 1, "another request has read it since"
        conversations.take_back(conversation, first, engine.requests[1])
        assert conversation.read == 0
        await engine.ask(messages=[{"role": "user", "content": "other"}])
        conversations.take_back(conversation, first, engine.requests[1])  # an older turn: too late
        assert conversation.read == 2 and len(engine.asked) == 2

    asyncio.run(talk())


def test_a_call_that_is_not_in_the_format_stays_text(tokenizer: Any) -> None:
    said = '<tool_call>{"name": "add"}</tool_call>'
    engine = Engine(tokenizer, f"{said}<|end|>")
    turn = asyncio.run(engine.ask(tools=[ADD])).answer.completion()["choices"][0]
    assert turn["message"] == {"role": "assistant", "content": said}
    assert turn["finish_reason"] == "stop"


def test_other_tools_begin_another_branch_and_the_same_do_not(tokenizer: Any) -> None:
    engine = Engine(tokenizer, f"{CALL}<|end|>")

    async def talk() -> None:
        first = (await engine.ask(tools=[ADD])).answer.completion()["choices"][0]["message"]
        assert first["content"] is None
        behind = [*MESSAGES, first, {"role": "tool", "content": "3"}]
        for tools in ([ADD], [], [ADD, ADD]):
            await engine.ask(messages=behind, tools=tools)
        edited = {**first, "tool_calls": [{**first["tool_calls"][0], "id": "mine"}]}
        await engine.ask(messages=[*MESSAGES, edited, *behind[2:]], tools=[ADD])
        arguments = {"name": "add", "arguments": '{"a": 1, "b": 3}'}
        edited["tool_calls"] = [{"type": "function", "function": arguments}]
        await engine.ask(messages=[*MESSAGES, edited, *behind[2:]], tools=[ADD])

    asyncio.run(talk())
    assert [asked.behind for asked in engine.asked] == [0, 1, 0, 0, 1, 0]
    rendered = [tokenizer.decode(list(asked.token_ids)) for asked in engine.asked]
    assert CALL not in rendered[1] and f"<|assistant|>\n{CALL}<|end|>" in rendered[2]
    assert '{"a": 1, "b": 3}' in rendered[5]


def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    engine = Engine(with_template(CHAT_TEMPLATE), "x<|end|>")
    call = {"function": {"name": "add", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]
    for fields in ({"tools": [ADD]}, {"messages": messages}):
        with pytest.raises(ApiError, match=r"does not show tools.*describe the tools") as refused:
            asyncio.run(engine.ask(**fields))
        assert refused.value.status == 400 and not engine.asked
