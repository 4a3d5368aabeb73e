"""What clients ask for: what is read, what asks for nothing, and what is refused with a fix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mindspeed_rl.endpoint.requests import ApiError, ChatRequest, parse_request

MESSAGES = [{"role": "user", "content": "hi"}]


def parsed(**fields: Any) -> ChatRequest:
    body = {"model": "policy", "messages": MESSAGES, **fields}
    return parse_request(json.dumps(body).encode())


def test_fields_that_ask_for_nothing_are_taken() -> None:
    found = parsed(
        stream=False, n=1, logprobs=None, stop=[], tools=[], tool_choice="auto", user="me",
        response_format={"type": "text"}, presence_penalty=0.0, metadata={"a": "b"},
    )  # fmt: skip
    assert found == ChatRequest(tuple(MESSAGES), None, ())


def test_streams_and_tools_are_read_with_arguments_as_objects() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [{"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]
    options = {"include_usage": True}
    found = parsed(stream=True, stream_options=options, tools=[tool], messages=given)
    assert (found.stream, found.usage, found.tools) == (True, True, (tool,))
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.messages[0] == {"role": "assistant", "content": "", "tool_calls": [read]}


def test_settings_of_sampling_are_the_runs_and_named() -> None:
    assert parsed(temperature=0.2, top_p=0.9).overridden == ("temperature", "top_p")


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 5),
        ({"max_tokens": None}, None),
    ],
)
def test_a_limit_of_tokens_has_two_names(fields: dict[str, Any], most: int | None) -> None:
    assert parsed(**fields).max_tokens == most


def test_messages_are_what_the_template_reads() -> None:
    """Fields without a value, which clients send back, are no part of a message."""
    given = [
        {"role": "system", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": {}},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]  # fmt: skip
    assert parsed(messages=given).messages == (
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    )


@pytest.mark.parametrize(
    ("fields", "status", "code", "told"),
    [
        ({"model": "gpt"}, 404, "model_not_found", "'gpt': this endpoint has 'policy'"),
        ({"stream": 1}, 400, "invalid_value", "stream 1: give true or false"),
        ({"stream_options": {"x": 1}}, 400, "unsupported_parameter", "stream_options: x"),
        ({"n": 2}, 400, "unsupported_parameter", "n 2: a turn has one answer"),
        ({"logprobs": True}, 400, "unsupported_parameter", "the trainer has them"),
        ({"stop": ["\n"]}, 400, "unsupported_parameter", "own stop token"),
        ({"tools": {}}, 400, "invalid_value", "tools: give a list"),
        ({"tools": [{"type": "function"}]}, 400, "invalid_value", r"tools\[0\]: give"),
        ({"tools": [{"type": "web_search"}]}, 400, "invalid_value", r"tools\[0\]: .* not served"),
        (
            {"tools": [{"type": "function", "function": {"parameters": {}}}]},
            400, "invalid_value", r"tools\[0\]: .* name",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            400, "unsupported_parameter", "strict: decoding is not constrained",
        ),
        ({"tool_choice": "required"}, 400, "unsupported_parameter", "tool_choice .* constrained"),
        ({"tool_choice": "none"}, 400, "unsupported_parameter", "tool_choice .* tools as well"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "constrained"),
        ({"beam_width": 3}, 400, "unsupported_parameter", "beam_width 3: .* leave it out"),
        ({"messages": []}, 400, "invalid_value", "at least one message"),
        ({"messages": "hi"}, 400, "invalid_value", "at least one message"),
        ({"messages": [{"content": "x"}]}, 400, "invalid_value", r"messages\[0\]: .* role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_value", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400, "invalid_value", "only parts of text",
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]},
            400, "invalid_value", "last one is the assistant",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}, *MESSAGES]},
            400, "invalid_value", r"messages\[0\].tool_calls\[0\]: give a function",
        ),
        (
            {"messages": [{"role": "user", "content": "", "tool_calls": [1]}]},
            400, "invalid_value", r"messages\[0\]: tool_calls: .* assistant",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": "[1]"}}]}, *MESSAGES]},
            400, "invalid_value", "arguments: give a JSON object",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}, *MESSAGES]},
            400, "unsupported_parameter", "use tool_calls",
        ),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens 0: give a positive integer"),
        ({"max_tokens": True}, 400, "invalid_value", "positive integer"),
        ({"max_tokens": "9"}, 400, "invalid_value", "positive integer"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    fields: dict[str, Any], status: int, code: str, told: str
) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        parsed(**fields)
    assert caught.value.status == status
    assert caught.value.body["error"]["code"] == code


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"null"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is") as caught:
        parse_request(body)
    assert caught.value.body["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[" * 70 + "]" * 70, '"\\ud800"', '{"a": "\\udfff"}']
)
def test_what_no_template_or_tokenizer_takes_is_refused(content: str) -> None:
    body = f'{{"model": "policy", "messages": [{{"role": "user", "content": {content}}}]}}'
    with pytest.raises(ApiError, match="the body is no JSON: ") as caught:
        parse_request(body.encode())
    assert caught.value.status == 400
    call = {"function": {"name": "f", "arguments": f'{{"a": {content}}}'}}
    given = [{"role": "assistant", "tool_calls": [call]}, *MESSAGES]
    with pytest.raises(ApiError, match="arguments: give a JSON object"):
        parsed(messages=given)
