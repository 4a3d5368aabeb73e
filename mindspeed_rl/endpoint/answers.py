"""Turns of the model in the form of the OpenAI API: as a whole, and as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rl.endpoint.tasks import MODEL
from mindspeed_rl.endpoint.tools import ToolCall

END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer and each of its events begin with.

    Attributes:
        id: Name of the answer.
        created: Second in which it began.
    """

    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields of an object of the API."""
        return {"id": self.id, "object": kind, "created": self.created, "model": MODEL}

    def opening(self, *, usage: bool) -> bytes:
        """Return the first event of a stream."""
        return self.event({"role": "assistant", "content": ""}, usage=usage)

    def event(self, delta: dict[str, Any], reason: str | None = None, *, usage: bool) -> bytes:
        """Return an event of a stream; with ``usage`` the numbers of tokens come in a later one."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._event([choice], {"usage": None} if usage else {})

    def closing(self, usage: dict[str, int]) -> bytes:
        """Return the event with the numbers of tokens."""
        return self._event([], {"usage": usage})

    def _event(self, choices: list[dict[str, Any]], numbers: dict[str, Any]) -> bytes:
        chunk = {**self.fields("chat.completion.chunk"), "choices": choices, **numbers}
        return f"data: {json.dumps(chunk)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """A turn of the model, as a client gets it.

    Attributes:
        head: What every object of it begins with.
        content: Text in front of the calls.
        calls: Calls of tools that the turn ends with.
        cut: Whether it has no stop token.
        asked: Tokens that the model read.
        said: Tokens that it sampled.
    """

    head: AnswerHead
    content: str
    calls: tuple[ToolCall, ...]
    cut: bool
    asked: int
    said: int

    @property
    def _finish_reason(self) -> str:
        if self.cut:
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.asked,
            "completion_tokens": self.said,
            "total_tokens": self.asked + self.said,
        }

    @property
    def _tool_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call-{self.head.id.removeprefix('chatcmpl-')}-{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for number, call in enumerate(self.calls)
        ]

    def completion(self) -> dict[str, Any]:
        """Return the answer as one object."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self._tool_calls}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason,
        }
        return {**self.head.fields("chat.completion"), "choices": [choice], "usage": self._usage}

    def rest(self, shown: str, *, usage: bool) -> Iterator[bytes]:
        """Return the events behind the opening and the text that was shown already.

        Args:
            shown: Beginning of ``content`` that earlier events had.
            usage: Whether an event with the numbers of tokens is the last one.
        """
        assert self.content.startswith(shown), "a stream takes no text back"
        deltas: list[dict[str, Any]] = []
        if text := self.content[len(shown) :]:
            deltas.append({"content": text})
        deltas += [
            {"tool_calls": [{"index": number, **call}]}
            for number, call in enumerate(self._tool_calls)
        ]
        for delta in deltas:
            yield self.head.event(delta, usage=usage)
        yield self.head.event({}, self._finish_reason, usage=usage)
        if usage:
            yield self.head.closing(self._usage)
        yield END_OF_STREAM
