"""The exception for mistakes of the user, which every module can raise."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType


class UsageError(ValueError):
    """A mistake of the user: reported once, in one line, without a traceback, with exit code 2.

    The message names the flag or file, its value, what is allowed and the fix.
    """


class Mistakes:
    """Collects what several checks find, so that the user reads of all mistakes at once.

    Every check runs in a ``with`` block of its own, which ends at its first mistake.
    """

    def __init__(self, found: Iterable[str] = ()) -> None:
        self._found = dict.fromkeys(found)

    def __enter__(self) -> None:
        """Begin a check."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Keep the mistake that ended the check; other exceptions go on."""
        if isinstance(error, UsageError):
            self._found[str(error)] = None
            return True
        return False

    def report(self) -> None:
        """End the run if there were mistakes.

        Raises:
            UsageError: There were; the message has each of them once.
        """
        if self._found:
            raise UsageError("; ".join(self._found))
