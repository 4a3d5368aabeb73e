"""Algorithms by the names that users choose them by; each is declared beside its formula.

A formula and its declaration are one function with a decorator, so neither is there without the
other. Choices of flags, their help, the checks of what goes together and the tables of
``docs/algorithms.md`` are read from the catalogues, which therefore import without torch: formulas
are written in methods of tensors, and one that needs torch itself imports it when it is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value of a flag that chooses an algorithm.

    Attributes:
        name: the value.
        summary: the formula, or what it does, in a few words.
        source: where it is published; empty for nowhere in particular.
        reads: fields of the settings of its catalogue that it reads.
    """

    name: str
    summary: str
    source: str = ""
    reads: tuple[str, ...] = ()


AnyChoice = TypeVar("AnyChoice", bound=Choice)


class Catalogue(Mapping[str, AnyChoice], Generic[AnyChoice]):
    """The choices of one flag by name, in the order in which they are declared.

    Args:
        flag: the flag, as it is typed.
        settings: the dataclass of flags that only some of the choices read.
    """

    def __init__(self, flag: str, settings: type[Any] | None = None) -> None:
        self.flag = flag
        self._settings = {f.name for f in dataclasses.fields(settings)} if settings else set()
        self._choices: dict[str, AnyChoice] = {}

    def add(self, choice: AnyChoice) -> None:
        """Declare a choice.

        Raises:
            ValueError: its name is taken, or it reads what is not among the settings.
        """
        if choice.name in self._choices:
            raise ValueError(f"{self.flag} {choice.name} is declared twice")
        if unknown := set(choice.reads) - self._settings:
            raise ValueError(f"{self.flag} {choice.name} reads {sorted(unknown)}: no such setting")
        self._choices[choice.name] = choice

    def readers(self, setting: str) -> tuple[str, ...]:
        """The names of the choices that read a setting."""
        return tuple(name for name, choice in self._choices.items() if setting in choice.reads)

    @property
    def summary(self) -> str:
        """All choices in a sentence."""
        return "; ".join(f"{name}: {choice.summary}" for name, choice in self.items()) + "."

    def __getitem__(self, name: str) -> AnyChoice:
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)
