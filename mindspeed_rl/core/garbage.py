"""A pause of garbage collection while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the collector of reference cycles; also a decorator of functions that make plans.

    Plans are hundreds of thousands of small objects without cycles. Repeated scans of all of them
    would take a quarter of the time and free nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
