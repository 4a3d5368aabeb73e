"""Catalogues of algorithms: the names that users choose them by, declared with their formulas.

A decorator declares the formula that follows it, so neither exists without the other. The choices
of flags, their help, the checks of what goes together and the tables of ``docs/algorithms.md`` are
read from the catalogues, which therefore import without torch: formulas use methods of tensors, and
one that needs torch itself imports it when it is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of a flag that chooses an algorithm.

    Attributes:
        name: The value.
        summary: What the algorithm computes, in a few words.
        formula: The function that computes it.
        source: Publication of the algorithm; empty if it has none.
        reads: Fields of the settings of its catalogue that it reads.
    """

    name: str
    summary: str
    formula: Callable[..., Any]
    source: str = ""
    reads: tuple[str, ...] = ()


AnyChoice = TypeVar("AnyChoice", bound=Choice)
Formula = TypeVar("Formula", bound=Callable[..., Any])


class Catalogue(dict[str, AnyChoice]):
    """The choices of one flag by name, in the order in which they are declared.

    Args:
        flag: The flag, as it is typed.
        kind: Class of its choices.
    """

    def __init__(self, flag: str, kind: type[AnyChoice]) -> None:
        super().__init__()
        self.flag = flag
        self._kind = kind

    def declare(
        self, summary: str, source: str = "", *, name: str = "", **properties: Any
    ) -> Callable[[Formula], Formula]:
        """Declare the decorated function as a choice, by default under its own name.

        Args:
            summary: As in :class:`Choice`.
            source: Publication of the formula.
            name: Name of the choice.
            properties: Further fields of the class of the choices.
        """

        def declared(formula: Formula) -> Formula:
            named: dict[str, Any] = {"name": name or formula.__name__, "summary": summary}
            self.add(self._kind(**named, source=source, formula=formula, **properties))
            return formula

        return declared

    def add(self, choice: AnyChoice) -> None:
        """Add a choice.

        Raises:
            ValueError: its name is taken.
        """
        if choice.name in self:
            raise ValueError(f"{self.flag} {choice.name} is declared twice")
        self[choice.name] = choice

    def readers(self, setting: str) -> tuple[str, ...]:
        """Return the names of the choices that read a setting."""
        return tuple(name for name, choice in self.items() if setting in choice.reads)

    @property
    def summary(self) -> str:
        """All choices and their summaries in one sentence."""
        return "; ".join(f"{name}: {choice.summary}" for name, choice in self.items()) + "."
