"""One planted fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Attributes:
        name: what is wrong, in words with dashes.
        file: path below mindspeed_rl/.
        old: text that occurs exactly once in it.
        new: what takes its place.
        test: pytest node id that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
