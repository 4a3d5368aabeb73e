"""A change of state as a list of actions that is done as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby


def nothing() -> None:
    """For an action that has nothing to undo."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, and how to take it back.

    Attributes:
        name: for tables and errors.
        phase: what its time is logged as.
        do: leaves everything as it was when it raises.
        undo: called after ``do`` has succeeded and a later action has not.
    """

    name: str
    phase: str
    do: Callable[[], None]
    undo: Callable[[], None] = nothing


class UndoFailed(RuntimeError):
    """The actions of a transition could be neither finished nor taken back."""


def perform(
    actions: Sequence[Action], phase: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Do all actions in order; when one raises, undo those that are done, last first. Local.

    Raises:
        UndoFailed: an undo raised as well; its cause is the first error.
        BaseException: what an action raised; everything is as it was before.
    """
    done: list[Action] = []
    try:
        for name, same_phase in groupby(actions, key=lambda action: action.phase):
            with phase(name):
                for action in same_phase:
                    action.do()
                    done.append(action)
    except BaseException as error:
        for action in reversed(done):
            try:
                action.undo()
            except BaseException as second:
                raise UndoFailed(
                    f"{action.name} could not be taken back ({second}) after an error"
                ) from error
        raise
