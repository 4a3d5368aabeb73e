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
        do: may raise at any point.
        undo: takes back what ``do`` has done, all, some or nothing of it. Called when ``do`` or a
            later action raises.
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
    """Do all actions in order; when one raises, undo it and those before, last first. Local.

    Raises:
        UndoFailed: an undo raised as well; its cause is the first error.
        BaseException: what an action raised; everything is as it was before.
    """
    prefix_tokens: list[Action] = []
    try:
        for name, same_phase in groupby(actions, key=lambda action: action.phase):
            with phase(name):
                for action in same_phase:
                    prefix_tokens.append(action)
                    action.do()
    except BaseException as error:
        for action in reversed(prefix_tokens):
            try:
                action.undo()
            except BaseException as second:
                raise UndoFailed(
                    f"{action.name} could not be taken back ({second}) after an error"
                ) from error
        raise
