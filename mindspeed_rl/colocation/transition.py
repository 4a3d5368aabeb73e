"""Performs a change of state as a list of actions, as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby


def nothing() -> None:
    """Do nothing: the undo of an action that has nothing to undo."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a transition, and how to undo it.

    Attributes:
        name: Name of the action in tables and errors.
        phase: Phase under which its time is logged.
        do: Performs the action, and may raise at any point.
        undo: Undoes whatever ``do`` has done, which may be a part or nothing. Called when ``do`` or
            a later action raises.
    """

    name: str
    phase: str
    do: Callable[[], None]
    undo: Callable[[], None] = nothing


class UndoFailed(RuntimeError):
    """The error of a transition that could be neither finished nor undone."""


def perform(
    actions: Sequence[Action], phase: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Do all actions in order; when one raises, undo it and those before, last first. Local.

    Raises:
        UndoFailed: An undo raised as well; its cause is the first error.
        BaseException: The error of an action, after all actions were undone.
    """
    done: list[Action] = []
    try:
        for name, same_phase in groupby(actions, key=lambda action: action.phase):
            with phase(name):
                for action in same_phase:
                    done.append(action)
                    action.do()
    except BaseException as error:
        for action in reversed(done):
            try:
                action.undo()
            except BaseException as second:
                raise UndoFailed(
                    f"{action.name} could not be taken back ({second}) after an error"
                ) from error
        raise
