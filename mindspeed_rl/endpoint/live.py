"""A turn of the model while the engine samples it: what of its text may be shown.

What is shown is never taken back: a character is shown when all its bytes are there, and with tools
the beginning of what may become a call is kept until the turn is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mindspeed_rl.endpoint.answers import AnswerHead
from mindspeed_rl.endpoint.tools import OPEN

_MAX_KEPT_TOKENS = 256  # that are no whole characters; more are bytes of no text


class LiveText:
    """The text of a turn that grows.

    Args:
        decode: Text of tokens.
        calls: Whether the turn may end with calls of tools.

    Attributes:
        shown: What was given out so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, calls: bool) -> None:
        self._decode = decode
        self._calls = calls
        self._text = ""
        self._begin = 0  # tokens before it do not change the text of those behind ``_read``
        self._read = 0  # tokens whose text is known
        self.shown = ""

    def grow(self, token_ids: Sequence[int]) -> str:
        """Return what may be shown of all tokens so far, behind what was shown."""
        new = self._new_text(token_ids)
        if new.endswith("\ufffd") and len(token_ids) - self._read < _MAX_KEPT_TOKENS:
            return ""  # a character may go on in the next token
        self._text += new
        self._begin, self._read = self._read, len(token_ids)
        piece = self._text[len(self.shown) : self._safe()]
        self.shown += piece
        return piece

    def end(self, token_ids: Sequence[int]) -> str:
        """Return the text of the whole turn, which begins with what was shown."""
        whole = self._decode(token_ids)
        if whole.startswith(self._text):
            return whole
        return self._text + self._new_text(token_ids)  # a decoder that changed earlier text

    def _new_text(self, token_ids: Sequence[int]) -> str:
        known = self._decode(token_ids[self._begin : self._read])
        text = self._decode(token_ids[self._begin :])
        if text.startswith(known):
            return text[len(known) :]
        return self._decode(token_ids[self._read :])

    def _safe(self) -> int:
        """Return how many characters are no beginning of a call."""
        if not self._calls:
            return len(self._text)
        found = self._text.find(OPEN, len(self.shown))
        if found >= 0:
            return found
        kept = next(n for n in range(len(OPEN) - 1, -1, -1) if self._text.endswith(OPEN[:n]))
        return len(self._text) - kept


class LiveTurn:
    """A turn whose client reads it while it is sampled.

    Args:
        text: Its text.

    Attributes:
        head: What every event of it has; ``None``: its generation has not begun.
    """

    def __init__(self, text: LiveText) -> None:
        self._text = text
        self._token_ids: list[int] = []
        self._grown = asyncio.Event()
        self.head: AnswerHead | None = None

    @property
    def shown(self) -> str:
        """The text that was given out so far."""
        return self._text.shown

    def note(self, first: int, token_ids: Sequence[int]) -> None:
        """Take tokens that were sampled; those behind a gap wait for the end of the turn."""
        if first <= len(self._token_ids):
            self._token_ids[first:] = token_ids
            self._grown.set()

    def end(self, token_ids: Sequence[int]) -> str:
        """Return the text of the whole turn, without its stop token."""
        return self._text.end(token_ids)

    async def pieces(self, turn: asyncio.Task[Any]) -> AsyncIterator[str]:
        """Yield what may be shown whenever tokens have come, until the turn is whole."""
        turn.add_done_callback(lambda _: self._grown.set())
        while True:
            await self._grown.wait()
            self._grown.clear()
            if turn.done():
                return
            yield self._text.grow(self._token_ids)
