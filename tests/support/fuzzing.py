"""What tests put in place of what a file should hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mindspeed_rl.core.errors import UsageError

DEEP = b"[" * 100_000
"""Nested beyond what a parser takes."""

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value, a few levels deep."""


def damaged(sound: bytes, data: st.DataObject) -> bytes:
    """The bytes with a few flipped, cut off, doubled or put in, or with lists without an end."""
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat", "deep"]))
        if kind == "flip" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:]
        elif kind == "repeat":
            content[at:at] = content[at : at + 20]
        else:
            content[at:at] = DEEP if kind == "deep" else data.draw(st.binary(max_size=9))
    return bytes(content)


def read_or_refused(read: Callable[[], object], *named: str) -> None:
    """The reader returns, or refuses in one line with one of the names; nothing else is raised."""
    try:
        read()
    except UsageError as error:
        assert any(name in str(error) for name in named), str(error)
