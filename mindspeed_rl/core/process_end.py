"""Ends a process that has done its work without waiting for native libraries.

Import this before the libraries: what is registered first at the exit of Python runs last.
"""

from __future__ import annotations

import atexit
import os
import sys

_done = [False]


def end_process() -> None:
    """Let this process end with exit code 0 after Python's exit handlers. Call it last.

    Destructors of native libraries do not run: those of collectives and devices join threads, which
    may never end, and of a job that has written everything that would make a failure. The system
    frees what they would.
    """
    _done[0] = True


@atexit.register
def _leave() -> None:
    if _done[0]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
