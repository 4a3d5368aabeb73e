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
class ModelTurn:
    """A turn of the model, as a client gets it.

    Attributes:
        id: Name of the answer.
        pieces: Text in front of the calls, in pieces for a stream.
        calls: Calls of tools that the turn ends with.
        cut: Whether it has no stop token.
        asked: Tokens that the model read.
        said: Tokens that it sampled.
    """

    id: str
    pieces: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    cut: bool
    asked: int
    said: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def content(self) -> str:
        """The text in front of the calls."""
        return "".join(self.pieces)

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
                "id": f"call-{self.id.removeprefix('chatcmpl-')}-{number}",
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
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage}

    def events(self, *, usage: bool) -> Iterator[bytes]:
        """Return the answer as server-sent events.

        Args:
            usage: Whether an event with the numbers of tokens is the last one.
        """
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in self.pieces]
        deltas += [
            {"tool_calls": [{"index": number, **call}]}
            for number, call in enumerate(self._tool_calls)
        ]
        numbers = {"usage": None} if usage else {}
        for delta in deltas:
            yield self._event([_choice(delta, None)], numbers)
        yield self._event([_choice({}, self._finish_reason)], numbers)
        if usage:
            yield self._event([], {"usage": self._usage})
        yield END_OF_STREAM

    def _event(self, choices: list[dict[str, Any]], numbers: dict[str, Any]) -> bytes:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices, **numbers}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": MODEL}


def _choice(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
