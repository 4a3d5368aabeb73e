"""Tools of a request: what a client may declare, and the calls in the text of a turn.

Calls are read in the plain Hermes format, as Qwen has it: any text, then
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` once or more, and nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_rl.environments.chat import TemplateRefusal, rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a turn of the model ends with."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """The call as a chat template reads it."""
        return {"name": self.name, "arguments": dict(self.arguments)}


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text in front of the calls, and the calls. Pure.

    A text that is not in the format, where a call is malformed, not closed, or followed by other
    text, has no calls and stays as it is.
    """
    content, *parts = text.split(OPEN)
    found = []
    for part in parts:
        inside, close, behind = part.partition(CLOSE)
        call = _call(inside)
        if call is None or not close or behind.strip():
            return text, ()
        found.append(call)
    return content, tuple(found)


def _call(text: str) -> ToolCall | None:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or given.keys() != {"name", "arguments"}:
        return None
    name, arguments = given["name"], given["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


_ASKED = {"role": "user", "content": "."}
_PROBE = ToolCall("probe", {"text": "a \u00e9", "number": 1, "list": [True, None]})
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def why_no_tools(tokenizer: PreTrainedTokenizerBase) -> str:
    """Say why requests with tools cannot be served with a tokenizer; empty: they can.

    The template must show the tools to the model, and must write a call of the model in the format
    that :func:`split_calls` reads, in tokens whose text is not left out.
    """
    calls = [{"type": "function", "function": _PROBE.function}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        plain = rendered(tokenizer, [_ASKED])
        shown = rendered(tokenizer, [_ASKED], [_PROBE_TOOL])
        before = rendered(tokenizer, [_ASKED], [_PROBE_TOOL], opened=False)
        begun = rendered(tokenizer, [_ASKED, said], [_PROBE_TOOL], opened=False)
    except TemplateRefusal as error:
        return f"the model's chat template refuses tools: {error}"
    if "probe" not in shown or shown == plain:
        return "the model's chat template does not show tools to the model"
    _, found = split_calls(_kept(tokenizer, begun[len(before) :]).strip())
    if found != (_PROBE,):
        return (
            "the model's chat template writes calls in another format than "
            f'{OPEN}{{"name": ..., "arguments": ...}}{CLOSE}, which is the one that is read'
        )
    return ""


def _kept(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return what of a text is left behind its tokens, as a client gets it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
