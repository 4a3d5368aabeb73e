"""The stages of a run, between which its driver decides when the ranks go on.

An entry's work is a generator that yields before every stage. Under torchrun nobody waits; a Ray
controller orders every stage of all ranks. Neither is known to the work itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleIds:
    """A set of sample ids in as many numbers as it has gaps.

    Attributes:
        ranges: first and last + 1 of each run of ids, ascending.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ids: Iterable[int]) -> SampleIds:
        """From ids in any order."""
        ranges: list[tuple[int, int]] = []
        for i in sorted(set(ids)):
            if ranges and ranges[-1][1] == i:
                ranges[-1] = (ranges[-1][0], i + 1)
            else:
                ranges.append((i, i + 1))
        return cls(tuple(ranges))

    def __len__(self) -> int:
        return sum(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the ranks do next.

    Attributes:
        name: of the stage.
        step: of the run, from 1.
        samples: of the step that it works on, once they are known.
    """

    name: str
    step: int
    samples: SampleIds = SampleIds()

    def __str__(self) -> str:
        of = f" of {len(self.samples)} samples" if self.samples else ""
        return f"{self.name} in step {self.step}{of}"


def run_through(stages: Iterable[Stage]) -> None:
    """Do all stages, one after the other."""
    for _ in stages:
        pass
