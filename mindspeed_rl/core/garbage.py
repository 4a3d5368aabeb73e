"""Pauses of garbage collection while plans are made and responses are generated."""

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


@contextmanager
def collection_afterwards() -> Iterator[None]:
    """Pause the collector of reference cycles, and let it collect all at the end.

    A collection while an engine generates makes all ranks of the engine wait.
    """
    with without_collection():
        yield
    if gc.isenabled():
        gc.collect()
