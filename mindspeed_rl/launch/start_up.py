"""Tells how a job goes on before its first step and after its last: stages with their seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

BEAT_S = 30.0
"""Seconds after which a stage that still runs is told."""
LEAST_S = 0.5
"""Seconds of a stage that is worth a line."""


class Tells(Protocol):
    """A job, which prints lines on rank 0."""

    def log_rank0(self, *lines: str) -> None: ...


F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def stage(
    tell: Callable[[str], None], name: str, beat_s: float = BEAT_S, least_s: float = LEAST_S
) -> Iterator[None]:
    """Tell how long the body took, and every ``beat_s`` seconds that it still runs. Local.

    A body that raises ends without a line, because its error says what happened; so does one that
    took less than ``least_s`` seconds.
    """
    began, over = time.monotonic(), threading.Event()

    def beat() -> None:
        while not over.wait(beat_s):
            tell(f"{name}: {time.monotonic() - began:.0f} s so far")

    watcher = threading.Thread(target=beat, name=name, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    if (seconds := time.monotonic() - began) >= least_s:
        tell(f"{name}: {seconds:.1f} s")


def start_stage(name: str) -> Callable[[F], F]:
    """Return a decorator for functions of a job that are a stage of it: see :func:`stage`.

    The job is their first argument, and prints the lines.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def told(job: Tells, *args: Any, **kwargs: Any) -> Any:
            with stage(job.log_rank0, name):
                return function(job, *args, **kwargs)

        return cast(F, told)

    return decorate
