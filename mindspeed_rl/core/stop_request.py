"""Whether this process was asked to save after its step and end (``--exit-signal-handler``).

The watchdog's guard asks when SIGTERM arrives; the loop of the run looks after every step.
"""

from __future__ import annotations

import threading

_ASKED = threading.Event()


def ask() -> None:
    """Ask for a save and the end after the present step."""
    _ASKED.set()


def is_asked() -> bool:
    """Whether somebody asked."""
    return _ASKED.is_set()


def withdraw() -> None:
    """Forget the request."""
    _ASKED.clear()
