"""What a client asks for, checked: a body of /v1/chat/completions as messages and a limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.core.nesting import DEEPEST, is_too_deep
from mindspeed_rl.endpoint.tasks import MODEL


class ApiError(Exception):
    """A refusal that a client reads, in the form of the OpenAI API.

    Attributes:
        status: Status of HTTP.
        code: Short name for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The answer as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return {"error": error}

    @property
    def event(self) -> bytes:
        """The answer as an event of a stream that has begun."""
        return f"data: {json.dumps(self.body)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one turn of the model.

    Attributes:
        messages: Messages for the chat template: fields without a value are left out, and the
            content is text.
        max_tokens: Most tokens that the client wants; ``None``: no limit of its own.
        overridden: Settings of sampling in the request that are those of the run instead.
        tools: Tools for the chat template.
        stream: Whether the answer comes as events.
        usage: Whether the last event has the numbers of tokens.
    """

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    overridden: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stream: bool = False
    usage: bool = False


# Sampling is the run's: log-probs of another distribution could not be trained on.
_OF_THE_RUN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
_WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        "parallel_tool_calls",
    }
)
# Values with which a field asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
_FIX = {
    "n": "a turn has one answer; ask again for another, which begins a branch",
    "logprobs": "leave it out; the trainer has them",
    "stop": "a turn ends with the model's own stop token; cut the text in the agent, or leave it",
    "tool_choice": "the model decides whether it calls a tool: decoding is not constrained; leave "
    "it out, and the tools as well for a turn without",
    "response_format": "decoding is not constrained, which would change the distribution",
}
_READ = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "tools",
        "stream",
        "stream_options",
    }
)


def parse_request(body: bytes) -> ChatRequest:
    """Return what a body of /v1/chat/completions asks for. Pure.

    Raises:
        ApiError: It is no JSON, not in the form of the API, or asks for what the endpoint cannot
            do; the message names the field and the fix.
    """
    try:
        fields = _read_json(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", f"the body is a {type(fields).__name__}, not an object")
    if fields.get("model") != MODEL:
        raise ApiError(
            404, "model_not_found", f"model {fields.get('model')!r}: this endpoint has {MODEL!r}"
        )
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() - _READ - _OF_THE_RUN - _WITHOUT_EFFECT:
        if not any(given[name] == neutral for neutral in _NEUTRAL.get(name, ())):
            why = _FIX.get(name, "the endpoint does not know it; leave it out")
            text = f"{name} {json.dumps(given[name])[:80]}: {why}"
            raise ApiError(400, "unsupported_parameter", text)
    return ChatRequest(
        messages=_messages(given.get("messages")),
        max_tokens=_max_tokens(given),
        overridden=tuple(sorted(given.keys() & _OF_THE_RUN)),
        tools=_tools(given.get("tools", [])),
        stream=_switch("stream", given.get("stream", False)),
        usage=_usage(given.get("stream_options", {})),
    )


def _read_json(text: str | bytes) -> Any:
    """Read JSON whose texts a tokenizer takes and whose depth a template takes.

    Raises:
        ValueError: It is none, or holds half of a surrogate pair, or is nested too deep.
    """
    try:
        value = json.loads(text)
        if is_too_deep(value):
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    return value


def _switch(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ApiError(400, "invalid_value", f"{name} {json.dumps(given)[:80]}: give true or false")
    return given


def _usage(given: Any) -> bool:
    if not isinstance(given, dict):
        raise ApiError(400, "invalid_value", "stream_options: give an object")
    if others := sorted(given.keys() - {"include_usage", "include_obfuscation"}):
        raise ApiError(
            400, "unsupported_parameter", f"stream_options: {others[0]} is not known; leave it out"
        )
    return _switch("stream_options.include_usage", given.get("include_usage", False))


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(given, list):
        raise ApiError(400, "invalid_value", "tools: give a list")
    for number, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ApiError(
                400,
                "invalid_value",
                f'tools[{number}]: give {{"type": "function", "function": {{...}}}}; other tools '
                "are not served",
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, "invalid_value", f"tools[{number}]: its function needs a name")
        if function.get("strict"):
            raise ApiError(
                400,
                "unsupported_parameter",
                f"tools[{number}]: strict: decoding is not constrained; leave it out",
            )
    return tuple(given)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    found = [given[n] for n in ("max_completion_tokens", "max_tokens") if n in given]
    for value in found:
        if type(value) is not int or value < 1:
            raise ApiError(400, "invalid_value", f"max_tokens {value!r}: give a positive integer")
    return min(found, default=None)


def _messages(given: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "invalid_value", "messages: give a list of at least one message")
    found = tuple(_message(number, one) for number, one in enumerate(given))
    if found[-1]["role"] == "assistant":
        raise ApiError(
            400,
            "invalid_value",
            "messages: the last one is the assistant's; a turn of the model follows a message of "
            "somebody else",
        )
    return found


def _message(number: int, given: Any) -> Mapping[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise ApiError(400, "invalid_value", f"{where}: give an object with a role")
    # Clients send the fields of an answer back that have no value, or an empty one.
    kept = {name: value for name, value in given.items() if value not in (None, [], {})}
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise ApiError(400, "invalid_value", f"{where}: content must be text or parts of text")
    if "function_call" in kept:
        raise ApiError(400, "unsupported_parameter", f"{where}: function_call: use tool_calls")
    if "tool_calls" in kept:
        if given["role"] != "assistant" or not isinstance(kept["tool_calls"], list):
            raise ApiError(400, "invalid_value", f"{where}: tool_calls: a list of the assistant's")
        kept["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{i}]", one) for i, one in enumerate(kept["tool_calls"])
        ]
    return {**kept, "content": content}


def _tool_call(where: str, given: Any) -> Mapping[str, Any]:
    """Return a call with its arguments as an object, as chat templates read it."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "invalid_value", f"{where}: give a function with name and arguments")
    arguments = function.get("arguments")
    try:
        arguments = _read_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "invalid_value", f"{where}: arguments: give a JSON object as text")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return found | ({"id": given["id"]} if isinstance(given.get("id"), str) else {})


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ApiError(400, "invalid_value", f"{where}: only parts of text are understood")
    if not isinstance(part.get("text"), str):
        raise ApiError(400, "invalid_value", f"{where}: a part of text needs a text")
    return str(part["text"])
