"""The exception for mistakes of the user. It imports nothing, so that every module can raise it."""

from __future__ import annotations


class UsageError(ValueError):
    """A mistake of the user: reported once, in one line, without a traceback, with exit code 2.

    The message names the flag or file, its value, what is allowed and the fix.
    """
