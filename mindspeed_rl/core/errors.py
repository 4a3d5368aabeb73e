"""The exception for mistakes of the user, which every module can raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from mindspeed_rl.core.redaction import redacted_text


class UsageError(ValueError):
    """Mistakes of the user: reported once, without a traceback, with exit code 2.

    Each is one line that names the flag or file, its value, what is allowed and the fix. Secrets
    in it are hidden.

    Args:
        *mistakes: A line for each of them.
    """

    def __init__(self, *mistakes: str) -> None:
        super().__init__(*map(redacted_text, mistakes))

    @property
    def mistakes(self) -> tuple[str, ...]:
        """A line for each mistake."""
        return self.args

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n  - ".join([f"{len(self.args)} mistakes:", *self.args])


class Mistakes:
    """Collects what several checks find, so that the user reads of all mistakes at once.

    Every check runs in a ``with`` block of its own, which ends at its first mistake. A check may
    itself raise several.
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
        """Keep the mistakes that ended the check; other exceptions go on."""
        if isinstance(error, UsageError):
            self._found |= dict.fromkeys(error.mistakes)
            return True
        return False

    def report(self, first: Iterable[str] = ()) -> None:
        """End the run if there were mistakes.

        Args:
            first: Mistakes that are told before them, and alone end nothing yet.

        Raises:
            UsageError: There were; it has each of them once.
        """
        if self._found:
            refuse([*first, *self._found])


def refuse(mistakes: Iterable[str]) -> None:
    """Raise all of these mistakes as one error; nothing where there are none.

    Raises:
        UsageError: There are some; it has each of them once.
    """
    if found := tuple(dict.fromkeys(mistakes)):
        raise UsageError(*found)


def check_each(*checks: Callable[[], object]) -> None:
    """Run checks that do not depend on each other, and raise what all of them find.

    Raises:
        UsageError: Some found mistakes; it has each of them once.
    """
    mistakes = Mistakes()
    for check in checks:
        with mistakes:
            check()
    mistakes.report()
