"""What was said in one conversation, and where in it the messages of a request belong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ChatMessage = Mapping[str, Any]
_START = b""


@dataclass(frozen=True, slots=True)
class ChatPlace:
    """Where the messages of a request continue a conversation.

    Attributes:
        behind: Number of the turn of the model that they follow, counted from 1; 0: none.
        messages: Messages behind it, which the model has not read there.
        digest: Of all messages of the request.
    """

    behind: int
    messages: tuple[ChatMessage, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Turn:
    length: int
    cut: bool


class ChatHistory:
    """The turns of one conversation, found again by the messages that clients send.

    The text of a turn stands for the tokens that were sampled: messages that begin as a known
    conversation continue with those tokens, whatever a tokenizer would make of the text. Messages
    that were changed match only up to the change.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._known: dict[bytes, int] = {}  # digest of messages that end with a turn -> its number

    def __len__(self) -> int:
        return len(self._turns)

    def find(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChatPlace:
        """Return the latest turn that the messages contain with all that came before it. Pure.

        Tools are a part of how a conversation begins, so other tools belong to no turn.
        """
        digest, behind, read = _chained(_START, {"tools": tools}) if tools else _START, 0, 0
        for number, message in enumerate(messages, start=1):
            digest = _chained(digest, message)
            if digest in self._known:
                behind, read = self._known[digest], number
        return ChatPlace(behind, tuple(messages[read:]), digest)

    def add(
        self,
        place: ChatPlace,
        length: int,
        text: str,
        calls: Sequence[Mapping[str, Any]] = (),
        *,
        cut: bool,
    ) -> None:
        """Add the model's answer.

        Args:
            place: Where it was asked for.
            length: Tokens of the conversation up to its end, behind the prompt.
            text: Text of the answer, as the client gets it.
            calls: Calls of tools behind it, each a function with its name and its arguments.
            cut: Whether it has no stop token.
        """
        self._turns.append(_Turn(length, cut))
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            said["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        self._known[_chained(place.digest, said)] = len(self._turns)

    def length(self, turn: int) -> int:
        """Return the number of tokens behind the prompt up to the end of a turn."""
        return self._turns[turn - 1].length if turn else 0

    def cut(self, turn: int) -> bool:
        """Whether a turn has no stop token."""
        return self._turns[turn - 1].cut


def _chained(digest: bytes, message: ChatMessage) -> bytes:
    if calls := message.get("tool_calls"):  # their names are for the answers, not the model's words
        message = {**message, "tool_calls": [{**call, "id": ""} for call in calls]}
    text = json.dumps(message, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(digest + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
