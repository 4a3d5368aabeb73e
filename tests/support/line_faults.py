"""A fault in the middle of anything: an exception before the n-th line that runs in some files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any


class Planted(Exception):
    """The fault."""


@contextmanager
def fault_before_line(
    number: int, files: Sequence[ModuleType], not_in: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Raise once before the ``number``-th line that is run in ``files``; 0: never.

    Only on this thread. Handlers and undos that run because of it are not disturbed.

    Args:
        number: counted from 1.
        files: modules whose lines count.
        not_in: functions of them that do not.

    Yields:
        The lines so far, as ``function:line``.
    """
    names = {str(module.__file__) for module in files}
    lines: list[str] = []

    def counts(code: CodeType) -> bool:
        return code.co_filename in names and code.co_name not in not_in

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            if len(lines) == number:
                sys.settrace(None)
                raise Planted(lines[-1])
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if counts(frame.f_code) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)
