"""Sums over the steps of a run, for its summary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Totals:
    """Sums over all steps of the run, for the summary; time when it was stopped is left out."""

    steps: int = 0
    wall_s: float = 0.0
    tokens: int = 0
    step_seconds: float = 0.0
    worst_mismatch: float = 0.0
    steps_with_signal: int = 0  # whose rewards differed; counted by the writer


def never_learned(totals: Totals) -> list[str]:
    """Return a warning for a run whose rewards never differed, so that it learned from none."""
    if not totals.steps or totals.steps_with_signal:
        return []
    return [
        f"warning: this run could not learn from its rewards: in none of its {totals.steps} steps "
        "did the rewards of two samples differ"
    ]
