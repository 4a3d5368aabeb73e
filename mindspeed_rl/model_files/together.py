"""Errors of files that one rank meets and all ranks raise, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.parallel.small_collectives import gather_objects

FileProblem = UsageError | OSError
T = TypeVar("T")


def together(act: Callable[[], T]) -> T:
    """Act on this rank and raise on all ranks if any of them met an error. Collective: the world.

    Returns:
        What ``act`` returned here.

    Raises:
        UsageError: With the text of the first rank that met an error, if that was one.
        OSError: The same.
    """
    problem: FileProblem | None = None
    found: list[T] = []
    try:
        found.append(act())
    except (UsageError, OSError) as error:
        problem = error
    raise_together(problem)
    return found[0]


def raise_together(problem: FileProblem | None) -> None:
    """Raise on all ranks if any of them has met an error. Collective: the world.

    Args:
        problem: The error of this rank; ``None``: there was none.

    Raises:
        UsageError: With the text of the first rank that has an error, if that is one.
        OSError: The same.
    """
    mine = None if problem is None else (isinstance(problem, UsageError), str(problem))
    for told in gather_objects(mine):
        if told is not None:
            is_usage, text = told
            raise (UsageError if is_usage else OSError)(text) from problem
